"""Every optimizer's state and temporaries, predicted, against what its own library makes on a CPU; bf16_master too."""

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Run, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from traces import SIMULATED as A100
from traces import Works, kept, on_this_gpu, signed, total, trace_trial
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.spec import runner_table, trial_parser
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.dispatch_modes import LiveBytes
from vramsweep.runners.model import build
from vramsweep.runners.predict import replay_trace
from vramsweep.runners.techniques import bitsandbytes_optimizers, torchao_adamw
from vramsweep.runners.trace.trace_data import Trace
from vramsweep.runners.worker import run_rank

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
# GPT-2 has biases, embeddings that are trained and tied, and here sizes that no block divides.
ODD: dict[str, Any] = {
    "name": "odd", "model_type": "gpt2", "parameters": None, "max_positions": 64, "path": None,
    "config": {"vocab_size": 301, "n_embd": 60, "n_layer": 2, "n_head": 4, "n_positions": 64},
}  # fmt: skip
PACKAGE = {entry.name: entry.packages[0].name for entry in catalog.entries("optimizer") if entry.packages}
PAGED = ("paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit")
COMPILED = ("adamw_torch_8bit", "adamw_torch_4bit")
EVERYWHERE = tuple(
    one.name
    for one in catalog.entries("optimizer")
    if "torch" in runner_table.technique_runners(one) and one.name not in PAGED
)
EFFECTIVE = {
    "sgd": "SGD", "sgd_momentum": "SGD", "adafactor": "Adafactor", "adamw_bnb_8bit": "AdamW(8-bit)",
    "lion_32bit": "Lion(32-bit)", "lion_8bit": "Lion(8-bit)", "adamw_torch_8bit": "AdamW8bit",
    "adamw_torch_4bit": "AdamW4bit",
}  # fmt: skip


def values(which: str, **over: Any) -> dict[str, Any]:
    """The tiny trial, or the same of the odd model."""
    chosen = tiny(**over)
    if which == "odd":
        chosen["model"] = ODD
    return chosen


def library(name: str) -> None:
    """Skip where the optimizer's package is not installed; forget what it keeps for the whole process.

    bitsandbytes has a table of parameters by `id`, the compiler its frames: an earlier test's are not this one's.
    """
    if name in PACKAGE:
        package = pytest.importorskip(PACKAGE[name])
        gc.collect()
        if PACKAGE[name] == "bitsandbytes":
            package.optim.GlobalOptimManager.get_instance().initialize()
        else:
            torch._dynamo.reset()


def traced(folder: Path, which: str = "tiny", **over: Any) -> tuple[Trace, dict[str, Any]]:
    return trace_trial(values(which, device=A100, **over), folder)


def stored(tensors: Iterable[Any], device: str = "cpu") -> int:
    """Bytes of the storages of tensors, each once, those of wrappers included."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for part in parts(tensor) if isinstance(tensor, torch.Tensor) else ():
            if part.device.type == device:
                found[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(found.values())


def parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    wraps = hasattr(tensor, "__tensor_flatten__")
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if wraps else [tensor]


def state(optimizer: torch.optim.Optimizer, device: str = "cpu", counters: bool = False) -> int:
    """Bytes of an optimizer's state without its step counters, which are on the host unless a kernel needs them."""
    each = [(key, tensor) for held in optimizer.state.values() for key, tensor in held.items()]
    return stored((tensor for key, tensor in each if counters or key != "step"), device)


@contextlib.contextmanager
def uncompiled(name: str) -> Iterator[None]:
    """torchao's optimizers make their state and step without the kernel, which takes seconds to compile."""
    if name in COMPILED:
        with mock.patch("torchao.optim.adam.torch.compile", lambda *args, **kwargs: lambda *args: None):
            yield
    else:
        yield


def stepped(chosen: Trial) -> Any:
    """The trial's own optimizer after one step on a real model on a CPU."""
    torch.manual_seed(0)
    net = build.model(chosen, CPU)
    optimizer = build.optimizer(chosen, net.parameters(), CPU)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    with uncompiled(chosen.optimizer):
        optimizer.step()
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "over"),
    [
        *((name, {}) for name in EVERYWHERE),
        *((name, {"precision": "bf16_pure"}) for name in ("adamw_bnb_8bit", *COMPILED, "adafactor")),
    ],
)
def test_state_is_the_library_s_to_the_byte(tmp_path: Path, name: str, over: dict[str, str]) -> None:
    """8-bit state of small tensors is fp32 in bitsandbytes, and of the parameter's dtype in torchao."""
    library(name)
    optimizer = stepped(trial_parser.parse(values("odd", optimizer=name, **over)))
    trace, details = traced(tmp_path, "odd", optimizer=name, **over)
    assert kept(trace, "optimizer_state") == state(optimizer, counters=name == "adamw_torch_fused")
    assert details["optimizer_effective"] == model_description.optimizer_name(optimizer) == EFFECTIVE.get(name, "AdamW")


def test_bf16_master_trains_where_bf16_alone_rounds_every_step_away() -> None:
    """Steps of 1e-5 are far less than half the distance of bf16 numbers near most weights, but they add up."""

    def changed(precision: str) -> float:
        chosen = trial_parser.parse(tiny(precision=precision))
        torch.manual_seed(0)
        net = build.model(chosen, CPU)
        weight = net.model.embed_tokens.weight
        before = weight.detach().clone()
        optimizer = build.optimizer(chosen, net.parameters(), CPU)
        for _ in range(40):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert weight.dtype is torch.bfloat16 and torch.isfinite(weight).all()
        return float((before != weight).float().mean())

    assert changed("bf16_master") > 0.95 > 0.3 > changed("bf16_pure") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["default", "adamw_torch_fused", "adamw_torch_loop", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit"]
)
def test_bf16_master_has_half_weights_and_copies_beside_the_state(tmp_path: Path, name: str) -> None:
    library(name)
    real = stepped(trial_parser.parse(values("odd", optimizer=name, precision="bf16_master")))
    copies = stored(real.masters)
    trace, details = traced(tmp_path, "odd", optimizer=name, precision="bf16_master")
    assert kept(trace, "optimizer_state") == copies + state(real.optimizer, counters=name == "adamw_torch_fused")
    assert total(trace, "parameters") == stored(real.parameters) == copies // 2 == 2 * details["parameters"]
    assert total(trace, "gradients") == 3 * (2 + 4) * details["parameters"]  # three steps, in bf16 and cast
    wrapped = f"MasterWeights({EFFECTIVE.get(name, 'AdamW')})"
    assert details["optimizer_effective"] == model_description.optimizer_name(real) == wrapped
    row, _ = trained(values("odd", optimizer=name, precision="bf16_master"), tmp_path)
    assert math.isfinite(row["loss_last"])


LARGE: dict[str, Any] = {"seq_len": 16, "micro_batch": 1, "model": {"config": {"vocab_size": 4096, "hidden_size": 128,
                         "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4}}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in ("adamw_torch_foreach", "adamw_torch_loop", "adafactor", "sgd_momentum")),
     *((name, "bf16_master") for name in ("adamw_torch_loop", "adamw_torch_foreach", "sgd"))],
)  # fmt: skip
def test_temporaries_are_those_of_the_library_on_a_cpu(tmp_path: Path, name: str, precision: str) -> None:
    """We watch every operator of a real step for what it needs besides weights, gradients and state."""
    over = {"optimizer": name, "precision": precision}
    chosen = trial_parser.parse(tiny(**LARGE, **over))
    net = build.model(chosen, CPU)
    optimizer = build.optimizer(chosen, net.parameters(), CPU)
    for again in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if again:
            break
        optimizer.step()  # makes the state
        optimizer.zero_grad()
    with LiveBytes() as live:
        before = live.take()
        optimizer.step()
        real = live.take() - before
    trace, _ = traced(tmp_path, **LARGE, **over)
    assert step_temporaries(trace) == pytest.approx(real, rel=0.01, abs=2048)


def step_temporaries(trace: Trace) -> int:
    """Bytes by which the last step's optimizer phase exceeds what was there when it began."""
    end = next(m.end for m in trace.marks if m.step == 2 and m.phase == "backward")
    last = next(m.end for m in trace.marks if m.step == 2 and m.phase == "optimizer")
    return max(0, *itertools.accumulate(signed(trace, end, last)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adamw_torch_fused", "adamw_bnb_8bit", "lion_32bit", "lion_8bit", "paged_adamw_32bit"]
)
def test_kernels_without_temporaries(tmp_path: Path, name: str) -> None:
    assert step_temporaries(traced(tmp_path, **LARGE, optimizer=name)[0]) == 0


def test_a_kernel_a_parameter_reads_the_gradient_and_changes_parameter_and_state() -> None:
    """As bitsandbytes launches them (optimizer.py, `step`)."""
    kind, given = bitsandbytes_optimizers.optimizer(
        trial_parser.parse(tiny(device=A100, optimizer="adamw_bnb_8bit")), CPU
    )
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (100, 25_600)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = kind(parameters, **given)
    optimizer.step()
    with Works() as works:
        optimizer.step()
    small = 4 * 100 * (1 + 2 + 2 * 2)
    large = 25_600 * (4 + 2 * 4 + 2 * 2) + 2 * 2 * 4 * 100 + 2 * 4 * 256
    assert [(asked.nbytes, asked.launches) for _, asked in works.seen] == [(small, 1), (large, 1)]


@pytest.mark.parametrize(("shape", "bits", "times"), [((512, 64), 8, 8), ((512, 256), 8, 0), ((8192,), 8, 0),
                                                      ((512, 64), 4, 24), ((512, 256), 4, 24)])  # fmt: skip
def test_temporaries_of_torchao_are_those_of_inductor_s_code(shape: tuple[int, ...], bits: int, times: int) -> None:
    """`times` a parameter's elements, in bytes, as read off the code that Inductor of torch 2.13 generates for CUDA
    from torchao 0.18's single_param_adam: two fp32 buffers, for 4 bits two int64 ones more; scales beside them."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    optimizer = {8: torchao_adamw.AdamW8bit, 4: torchao_adamw.AdamW4bit}[bits]([parameter])
    optimizer.step()
    gc.collect()  # what an earlier test left must not go while this is watched
    with LiveBytes() as live:
        before = live.take()
        optimizer.step()
        found = live.take() - before
    assert found == times * parameter.numel() + (2 * 4 * parameter.numel() // 256 if times else 0)


SHAPES = ((100, 1000), (99, 1010), (64, 64), (4095,), (4096,), (4097,), (120_000,), (333, 777), (7,))


def on_fake_cuda(name: str) -> tuple[int, int]:
    """Bytes on the card and in managed memory of bitsandbytes' own state, its code run for parameters on a card."""
    import bitsandbytes
    from bitsandbytes import functional
    from bitsandbytes.optim import optimizer as own

    def managed(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor: Any = torch.empty(*shape, dtype=dtype, device="meta")
        tensor.is_paged = True
        return tensor

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (functional, "get_paged", managed),
        *((functional, kernel, nothing) for kernel in ("fill", "prefetch_tensor", "optimizer_update_32bit",
                                                       "optimizer_update_8bit_blockwise")),
        (own, "sync_gpu", nothing),
    ]  # fmt: skip
    family = bitsandbytes.optim.Lion if "lion" in name else bitsandbytes.optim.AdamW
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        # its tables are made with values
        optimizer = family(parameters, optim_bits=8 if "8bit" in name else 32, is_paged=name.startswith("paged"))
        with mode:
            optimizer.step()
        return state(optimizer, "cuda"), state(optimizer, "meta")


@pytest.mark.parametrize("name", [*PAGED, "adamw_bnb_8bit", "lion_8bit", "lion_32bit"])
def test_what_is_paged_is_bitsandbytes_choice(name: str) -> None:
    library(name)
    chosen = trial_parser.parse(tiny(device=A100, optimizer=name))
    kind, given = bitsandbytes_optimizers.optimizer(chosen, CPU)
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = kind(parameters, **given)
        optimizer.step()
        found = state(optimizer), state(optimizer, "meta")
    assert found == on_fake_cuda(name)
    assert (found[1] > 0) == name.startswith("paged")


@pytest.mark.slow
def test_paged_state_is_not_the_allocator_s(tmp_path: Path) -> None:
    """The embedding of 131,072 elements is managed memory, but the Trainer wants 32 bits of it."""
    wide = {"model": {"config": {"vocab_size": 2048}}}
    for runner, size in (("torch", 1), ("trainer", 4)):
        over = wide | {"runner": {"name": runner}}
        plain, paged = (
            kept(traced(tmp_path, optimizer=name, **over)[0], "optimizer_state")
            for name in ("adamw_bnb_8bit", "paged_adamw_8bit")
        )
        assert plain - paged == 2 * size * 131_072


def trained(chosen: dict[str, Any], folder: Path) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """The trial's columns and the optimizer that took its steps."""
    seen: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        row = run_rank.run(trial_parser.parse(chosen), folder)
    finally:
        hook.remove()
    assert row is not None
    return row, seen[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runner"),
    [
        *((name, "torch") for name in EVERYWHERE if name not in COMPILED),
        *((name, "trainer") for name in ("adamw_torch_loop", "sgd_momentum", "adafactor", "adamw_bnb_8bit")),
        *((name, "trainer") for name in ("lion_32bit", *COMPILED)),
    ],
)
def test_real_steps_leave_the_state_that_is_predicted(tmp_path: Path, name: str, runner: str) -> None:
    """The Trainer has bitsandbytes keep 32 bits of every embedding."""
    library(name)
    over = {"optimizer": name, "runner": {"name": runner}}
    row, used = trained(tiny(**over), tmp_path)
    assert math.isfinite(row["loss_first"]) and math.isfinite(row["loss_last"])
    trace, details = traced(tmp_path, **over)
    assert kept(trace, "optimizer_state") == state(used, counters=name == "adamw_torch_fused")
    assert details["optimizer_effective"] == row["optimizer_effective"] == EFFECTIVE.get(name, "AdamW")
    if (name, runner) == ("adamw_bnb_8bit", "trainer"):
        alone, _ = traced(tmp_path, optimizer=name)
        assert kept(trace, "optimizer_state") > kept(alone, "optimizer_state")


@pytest.mark.slow
def test_the_trainer_s_arguments_reach_optimizers_that_it_does_not_know(tmp_path: Path) -> None:
    options = {"learning_rate": 0.5, "adam_beta1": 0.25, "lr_scheduler_type": "constant"}
    runner = {"name": "trainer", "options": options}
    group = trained(tiny(optimizer="adamw_torch_loop", runner=runner), tmp_path)[1].param_groups[0]
    assert (group["lr"], group["betas"][0], group["foreach"]) == (0.5, 0.25, False)


# pytorch/ao, torchao/optim/README.md: Llama-2-7B in bf16, full fine-tuning with torchtune on an A100 with PyTorch 2.4;
# GiB allocated at most. AdamW's state is bf16 there.
PUBLISHED = {"adamw_torch_fused": 51.6, "adamw_bnb_8bit": 39.3, "adamw_torch_8bit": 39.1, "adamw_torch_4bit": 33.2}
LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "vocab_size": 32000}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "adamw_torch_fused"])
def test_published_savings_of_llama_2_7b(name: str) -> None:
    """Peaks fell by as much as the state did, to the printed digit and a little more."""

    def at_rest(name: str) -> int:
        kind, given = build.apply_techniques.optimizer(trial_parser.parse(tiny(device=A100, optimizer=name)), CPU)
        if name == "adamw_torch_4bit":
            given["block_size"] = 128  # torchao's own, which torchtune leaves
        with FakeTensorMode():
            config = AutoConfig.for_model("llama", **LLAMA)
            net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for parameter in net.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer = kind(net.parameters(), **given)
            optimizer.step()
            return state(optimizer)

    saved = (at_rest("adamw_torch_fused") - at_rest(name)) / (1 << 30)
    assert saved == pytest.approx(PUBLISHED["adamw_torch_fused"] - PUBLISHED[name], abs=0.15)


def deepspeed(sharding: str, **over: Any) -> dict[str, Any]:
    small = {"zero_optimization": {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}}
    options = small | over.pop("options", {})
    chosen = {"precision": "bf16", "runner": {"name": "deepspeed", "options": options}, "sharding": sharding}
    return chosen | over


@pytest.mark.slow
def test_the_axis_lacks_some_of_torch_s_own_and_they_are_simulated_all_the_same(tmp_path: Path) -> None:
    for name, effective in (("adagrad", "Adagrad"), ("rmsprop", "RMSprop")):
        trace, details = traced(tmp_path, runner={"name": "trainer", "options": {"optim": name}})
        assert details["optimizer_effective"] == effective
        assert kept(trace, "optimizer_state") == pytest.approx(
            4 * details["parameters"], rel=1e-3
        )  # a value a parameter, and counters


CPU_ADAM = {"optimizer": "deepspeed_cpu_adam", "offload_optimizer": True}
ON_A_GPU = [
    *(
        {"optimizer": name, "runner": {"name": runner}}
        for name in (*EVERYWHERE, *PAGED)
        for runner in ("torch", "trainer")
        if name != "default"
    ),
    *(deepspeed(sharding, optimizer="deepspeed_fused_adam") for sharding in ("zero0", "zero2", "zero3")),
    deepspeed("zero2", **CPU_ADAM),
    {"precision": "bf16_master"},
]


@pytest.mark.gpu
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("over", ON_A_GPU, ids=str)
def test_on_a_card_memory_is_as_predicted(run_sweep: Run, over: dict[str, Any]) -> None:
    """The model's state is most of the memory."""
    library(over.get("optimizer", "default"))
    large = {**LARGE, "model": {"config": LARGE["model"]["config"] | {"vocab_size": 65_536}}}
    for measured, predicted in on_this_gpu(run_sweep, tiny(**large, **over), timeout_s=600):
        assert measured["optimizer_effective"] == predicted["optimizer_effective"]
        assert predicted["peak_allocated_bytes"] == pytest.approx(measured["peak_allocated_bytes"], rel=0.03)


@pytest.mark.slow
def test_replaying_stays_consistent_where_state_is_on_the_host(tmp_path: Path) -> None:
    trace, _ = traced(tmp_path, "odd", optimizer="paged_adamw_32bit")
    predicted = replay_trace.replay(trace, AllocatorConfig(), None)
    assert sum(predicted.breakdown.values()) == predicted.peak["allocated"]
