"""What CUDA runs otherwise than a CPU build of torch: found in torch's own list of operators, and each has an answer.

The list (native_functions.yaml, with torchgen in torch's wheel) names every operator's kernels by dispatch key. Those
with a kernel for CUDA and none for the CPU decompose there, or are chosen by code that asks for the device.
"""

import fnmatch
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
from conftest import cases
from torch import nn
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from vramsweep.runners.trace import cuda_emulation
from vramsweep.runners.trace.cuda_emulation import behave
from vramsweep.runners.trace.step_tracer import Tracer

pytestmark = pytest.mark.deterministic
Work = Callable[[], Callable[[], Any]]  # makes tensors, and returns the call
AMPERE = (8, 0)
ROWS, WIDE = 64, 128
ONE, STATE = 4 * ROWS * WIDE, 4 * 8 * WIDE  # bytes of all rows, of a state of 8 sequences, in fp32
DEEP = partial(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True)
ONE_EACH = ("_foreach_max", "_foreach_norm", "_foreach_powsum")  # a number for each tensor
OF_VALUES = {f"_foreach_addc{name}.Tensor" for name in ("div", "div_", "mul", "mul_")}  # read a tensor's values


def find_operators_of_cuda() -> set[str]:
    """Return the names of all operators with a kernel for CUDA and none for the CPU."""
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    found = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    cuda, cpu = (found.backend_indices[key] for key in (DispatchKey.CUDA, DispatchKey.CPU))
    return {str(one.func.name) for one in found.native_functions if cuda.has_kernel(one) and not cpu.has_kernel(one)}


def live(tracer: Tracer) -> int:
    return sum(tracer.trace.sizes[number] for number in tracer._card.numbers.values())


def traced(work: Work) -> tuple[Tracer, int]:
    """Run a call and its backward pass on fake tensors; return the tracer, and by how many bytes the call grew it."""
    tracer = Tracer(AMPERE)
    with behave(AMPERE), tracer.record():
        made, before = work(), live(tracer)
        result = made()
        grown = live(tracer) - before
        first = result[0] if isinstance(result, (list, tuple)) and result else result
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.backward(torch.ones_like(first))
    return tracer, grown


def of_layer(net: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return partial(net.to(dtype), torch.empty(*(shape or (ROWS, WIDE)), dtype=dtype, requires_grad=True))


def of_experts(dtype: torch.dtype) -> Callable[[], Any]:
    rows, weight = (torch.empty(*n, WIDE, dtype=dtype, requires_grad=True) for n in ((ROWS,), (4, 32)))
    return partial(F.grouped_mm, rows, weight.transpose(1, 2), offs=torch.empty(4, dtype=torch.int32))


def of_packed() -> Callable[[], Any]:
    rows, sizes, first = torch.empty(ROWS, WIDE), torch.tensor([8] * 8), torch.empty(1, 8, WIDE)
    return partial(torch._VF.gru, rows, sizes, first, nn.GRU(WIDE, WIDE)._flat_weights, True, 1, 0.0, True, False)


def of_lists(operator: Any) -> Callable[[], Any]:
    given = {"Tensor": torch.empty(()), "List[Tensor]": [torch.empty(WIDE), torch.empty(WIDE)], "number": 2}
    types = [str(one.type) for one in operator._schema.arguments if not one.has_default_value()]
    return partial(operator, *(given.get(one, [2.0, 2.0]) for one in types))


# What the trace says that it lacks; an operator that runs; the call; bytes that it leaves, counted by hand
CALLS: list[tuple[str, str, Work, int]] = [
    ("", "_fused_rms_norm", lambda: of_layer(nn.RMSNorm(WIDE), dtype=torch.bfloat16), ONE // 2 + 4 * ROWS),
    ("", "_fused_rms_norm_backward", lambda: of_layer(nn.RMSNorm(WIDE)), ONE + 4 * ROWS),
    ("", "_grouped_mm", lambda: of_experts(torch.float16), 2 * ROWS * 32),
    ("", "_grouped_mm", lambda: of_experts(torch.float32), 4 * ROWS * 32),
    # gates of input and hidden, and workspace; new and first states
    ("", "_thnn_fused_lstm_cell", lambda: of_layer(nn.LSTMCell(WIDE, WIDE)), (4 + 4 + 4 + 2 + 1) * ONE),
    ("", "_thnn_fused_gru_cell_backward", lambda: of_layer(nn.GRUCell(WIDE, WIDE)), (3 + 3 + 5 + 1 + 1) * ONE),
    ("kernel_scratch", "convolution", lambda: of_layer(nn.Conv1d(2, 4, 1), 8, 2, 16), 4 * 8 * 4 * 16),
    # outputs; gates and cells; inner outputs; new and first states
    ("recurrent_layers", "lstm", lambda: of_layer(nn.LSTM(WIDE, WIDE), 8, 8, WIDE), (1 + 5) * ONE + 4 * STATE),
    ("recurrent_layers", "lstm", lambda: of_layer(DEEP(WIDE, WIDE), 8, 8, WIDE), (2 + 4 * 5 + 2) * ONE + 4 * 4 * STATE),
    ("recurrent_layers", "gru", of_packed, (1 + 4) * ONE + STATE),
    ("recurrent_layers", "rnn_tanh", lambda: of_layer(nn.RNN(WIDE, WIDE), 8, 8, WIDE), ONE + 2 * STATE),
]


def test_every_operator_of_cuda_has_an_answer() -> None:
    found, answers = find_operators_of_cuda(), cases("operators_of_cuda")
    patterns = {pattern: answer for operators, answer, _ in answers for pattern in operators.split()}
    chosen = {name: {answer for one, answer in patterns.items() if fnmatch.fnmatch(name, one)} for name in found}
    assert {name: answer for name, answer in chosen.items() if len(answer) != 1} == {}
    assert [one for one in patterns if not fnmatch.filter(found, one)] == []
    assert {*patterns.values()} - {"emulated", "same", "by name", "never"} == {code for code, *_ in CALLS if code}


@pytest.mark.parametrize(("code", "operator", "call", "left"), CALLS)
def test_cuda_s_operator_runs_and_leaves_what_it_must(code: str, operator: str, call: Work, left: int) -> None:
    tracer, grown = traced(call)
    assert (grown, tracer.trace.not_covered) == (left, {code: [operator]} if code else {})
    ran = {one.name().removeprefix("aten::") for one in tracer.operators}
    assert operator in ran or code == "recurrent_layers"


def test_norms_of_mixed_dtypes_and_of_old_versions_keep_a_product_more(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = traced(lambda: partial(nn.RMSNorm(WIDE), torch.empty(ROWS, WIDE, dtype=torch.float64)))[1]
    monkeypatch.setattr(cuda_emulation, "NORM_FUSED", False)
    assert (mixed, traced(lambda: of_layer(nn.RMSNorm(WIDE)))[1]) == (4 * ONE, 2 * ONE + 4 * ROWS)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_more_is_kept_than_torch_s_own_layers_keep(layer: Any) -> None:
    """They keep all that they compute, and cuDNN no less than its backward pass needs: the bound is between."""
    net, x = layer(32, 32, 2), torch.zeros(8, 8, 32)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.backends.mkldnn.flags(enabled=False), torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        outputs, _ = net(x)
    own = {one.untyped_storage().data_ptr() for one in (x, *net.parameters())}
    most = outputs.nbytes + sum(one.nbytes() for at, one in kept.items() if at not in own)
    assert 2 * outputs.nbytes <= traced(lambda: of_layer(layer(32, 32, 2), 8, 8, 32))[1] <= most


def test_lists_of_tensors_arrive_whole() -> None:
    """And return what CUDA's kernels return: nothing in place, else a tensor or a number for each of two tensors."""
    for name in sorted(one for one in find_operators_of_cuda() - OF_VALUES if one.startswith("_foreach_")):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        tracer, grown = traced(partial(of_lists, operator))
        each = 0 if packet.endswith("_") else 4 if packet in ONE_EACH else 4 * WIDE
        assert (grown, tracer.operators[-1]) == (2 * each, operator), name
