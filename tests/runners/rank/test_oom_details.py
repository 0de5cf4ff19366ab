"""Test the reading of torch's out-of-memory errors; the messages come from real GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import parametrized, source
from torch.utils.checkpoint import checkpoint

from vramsweep.runners.rank import oom_details, process_end
from vramsweep.runners.techniques.master_weights import MasterWeights

# pytorch/pytorch's issues have both forms.
PLAIN = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.21 GiB is "
    "free. Including non-PyTorch memory, this process has 77.93 GiB memory in use. Of the allocated memory 74.51 GiB "
    "is allocated by PyTorch, and 2.78 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
SHORT = "Allocation on device 0 would exceed allowed memory. (out of memory)"  # cudaMallocAsync
ASYNC = source("oom_of_cuda_malloc_async.txt").rstrip()


def test_the_message_s_sizes() -> None:
    assert oom_details.oom_columns(torch.OutOfMemoryError(PLAIN)) == {
        "oom_request_bytes": round(1.96 * 2**30),
        "oom_allocated_bytes": round(74.51 * 2**30),
        "oom_reserved_bytes": round(74.51 * 2**30) + round(2.78 * 2**30),
    }
    small = oom_details.oom_columns(torch.OutOfMemoryError("Tried to allocate 20.00 MiB."))
    assert (small["oom_request_bytes"], small["oom_reserved_bytes"]) == (20 << 20, None)
    unsaid = oom_details.oom_columns(torch.OutOfMemoryError(SHORT))
    assert (unsaid["oom_request_bytes"], unsaid["oom_allocated_bytes"]) == (None, None)
    assert oom_details.oom_columns(RuntimeError(PLAIN)) == {}
    said = oom_details.oom_columns(torch.OutOfMemoryError(ASYNC))
    assert list(said.values()) == [round(10.12 * 2**30), round(4.86 * 2**30), None]


def test_a_script_s_error_tells_how_full_the_card_was_and_nothing_of_a_broken_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def free(device: torch.device) -> tuple[int, int]:
        if device.index:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return 1 << 20, 80 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    error = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
    told = [
        oom_details.describe_oom(error, device) for device in (torch.device("cuda", 0), torch.device("cuda", 1), None)
    ]
    assert [one["card_memory"] for one in told] == [[1 << 20, 80 << 30], None, None]
    assert {"columns", "phase"} <= set(oom_details.describe_oom(torch.OutOfMemoryError(ASYNC), None)) - set(told[0])
    error.card_memory = told[0]["card_memory"]  # type: ignore[attr-defined]
    assert process_end.error_result(error)["error"]["card_memory"] == [1 << 20, 80 << 30]
    assert "card_memory" not in process_end.error_result(RuntimeError("x"))["error"]


class Full(torch.autograd.Function):
    """Runs out of memory in the pass that it is told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        ctx.save_for_backward(x)  # which checkpointing makes again
        if where == "forward" or (where == "again" and torch._C._current_graph_task_id() != -1):
            raise torch.OutOfMemoryError(PLAIN)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.where == "backward":
            raise torch.OutOfMemoryError(PLAIN)
        return grad * ctx.saved_tensors[0], None


class FullOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = Asks()
        return super().step(closure)


class Asks(float):
    """A learning rate that runs out of memory when it is used."""

    def __neg__(self) -> float:
        raise torch.OutOfMemoryError(PLAIN)


@parametrized("phases_of_errors")
def test_the_phase_is_where_it_was_raised(where: str, phase: str) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = FullOptimizer([x], lr=0.1, foreach=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made = checkpoint(Full.apply, x, where, use_reentrant=False) if where == "again" else Full.apply(x, where)
        made.sum().backward()
        optimizer.step()
    assert oom_details.phase(caught.value) == phase


class FullOnUse(torch.Tensor):
    """A gradient on which any operator runs out of memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("__get__", "__set__", "is_sparse"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise torch.OutOfMemoryError(PLAIN)


class Restless(torch.optim.Optimizer):
    """One that nobody knows: its file is no library's."""

    def step(self, closure: Any = None) -> None:
        raise torch.OutOfMemoryError(PLAIN)


def full() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3).as_subclass(FullOnUse)
    return parameter


def of_a_scaler(use: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], object]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    use(scaler, torch.optim.SGD([full()], lr=0.1))


AFTER_BACKWARD: dict[str, Callable[[], object]] = {
    "clipped": lambda: torch.nn.utils.clip_grad_norm_([full()], 1.0),
    "clipped by value": lambda: torch.nn.utils.clip_grad_value_([full()], 1.0),
    "unscaled": lambda: of_a_scaler(lambda scaler, optimizer: scaler.unscale_(optimizer)),
    "a scaler's step": lambda: of_a_scaler(lambda scaler, optimizer: scaler.step(optimizer)),
    "cast to masters": lambda: MasterWeights([full()], lambda masters: torch.optim.SGD(masters, lr=0.1)).step(),
    "stepped": lambda: Restless([torch.nn.Parameter(torch.ones(3))], {}).step(),
    "forgotten": lambda: torch.optim.SGD([full()], lr=0.1).zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("what", AFTER_BACKWARD)
def test_what_follows_the_backward_pass_is_the_optimizer_s(what: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        AFTER_BACKWARD[what]()
    assert oom_details.phase(caught.value) == "optimizer"


def test_a_batch_and_a_scaled_loss_are_of_the_forward_phase() -> None:
    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise torch.OutOfMemoryError(PLAIN)

    def step() -> None:  # a custom target's, which is no optimizer's
        next(iter(torch.utils.data.DataLoader(Data())))

    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    assert oom_details.phase(caught.value) == "forward"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.amp.GradScaler("cpu").scale(torch.ones(3).as_subclass(FullOnUse))
    assert oom_details.phase(caught.value) == "forward"
