"""Everything that a process has of torch is as it was before `estimate`, also after an error, and training goes on."""

import copy
import gc
import os
import random
import resource
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules

import vramsweep

LIBRARIES = ("torch", "transformers", "accelerate", "numpy.random", "random", "copy")
CLASSES = (nn.Module, nn.Parameter, torch.Tensor, torch.UntypedStorage, torch.optim.Optimizer, torch.amp.GradScaler)
OPERATORS = ("dropout", "scaled_dot_product_attention", "rms_norm", "linear", "softmax.int", "native_dropout", "mm")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)
        self.calls: list[int] = []
        self.lock = threading.Lock()  # cannot be copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.1, self.training))


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def broken(output: torch.Tensor, batch: Any) -> torch.Tensor:
    random.random(), np.random.rand(), torch.set_default_dtype(torch.float64), torch.manual_seed(7)
    os.environ["LEFT_BEHIND"] = "1"
    raise KeyError("of the user")


def attributes() -> dict[tuple[str, str], int]:
    """The identity of every attribute of the libraries' modules and of the main classes: a patch would change it."""
    own = {name: vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] in LIBRARIES}
    own |= {kind.__name__: dict(vars(kind)) for kind in CLASSES}
    counters = ("DESCRIBER_NEXT_ID", "__warningregistry__")
    return {
        (name, key): id(one) for name, found in own.items() for key, one in list(found.items()) if key not in counters
    }


def state() -> dict[str, Any]:
    hooks = {
        name: dict(found)
        for name, found in vars(modules).items()
        if name.startswith("_global_") and isinstance(found, dict)
    }
    return {
        "torch": torch.get_rng_state().tolist(), "numpy": str(np.random.get_state()), "random": random.getstate(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "flags": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
                  torch.backends.cudnn.benchmark,
                  torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
                  torch.backends.cuda.flash_sdp_enabled(), torch.is_autocast_cache_enabled()),
        "hooks": hooks, "environment": dict(os.environ), "filters": list(warnings.filters), "path": list(sys.path),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()), "threads": threading.active_count(),
        "kernels": [torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS],
        "stack": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "calls": list(torch.cuda._queued_calls), "groups": dist.is_initialized(), "folder": str(Path.cwd()),
    }  # fmt: skip


def of_model(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    every = [net, *net.modules()]
    tensors = [*net.parameters(), *net.buffers()]
    own = [
        (t.data_ptr(), t._version, None if t.grad is None else (t.grad.data_ptr(), t.grad.sum().item()))
        for t in tensors
    ]
    held = [{name: copy.copy(value) for name, value in vars(one).items() if name != "lock"} for one in every]
    return {
        "tensors": own, "values": [t.double().sum().item() for t in tensors], "modules": [str(found) for found in held],
        "training": [one.training for one in every], "optimizer": str(optimizer.state_dict()),
        "attributes": [sorted(vars(t)) for t in tensors],
    }  # fmt: skip


@pytest.fixture
def trained() -> Iterator[tuple[Net, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]]:
    """A model in the middle of training, after a backward pass, with hooks and a scheduler."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net.first.register_forward_hook(lambda module, args, output: net.calls.append(-1))
    net.second.weight.register_hook(lambda grad: net.calls.append(-2))
    batch = torch.randn(8, 16), torch.randint(16, (8,))
    step(net, optimizer, batch)
    vramsweep.estimate(net, batch, optimizer, loss)  # imports everything
    with modules.register_module_forward_hook(lambda *args: pytest.fail("a global hook ran")):
        yield net, optimizer, batch


def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    value = loss(net(batch[0]), batch)
    value.backward()
    optimizer.step()
    return value.item()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("lost", [loss, broken])
@pytest.mark.parametrize("context", ["plain", "autocast", "no_grad", "fork_rng", "anomaly", "inference"])
def test_nothing_is_changed(trained: Any, lost: Any, context: str) -> None:
    net, optimizer, batch = trained
    contexts: dict[str, Any] = {
        "plain": torch.enable_grad(), "autocast": torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad(),
        "fork_rng": torch.random.fork_rng(), "anomaly": torch.autograd.detect_anomaly(),
        "inference": torch.inference_mode(),
    }  # fmt: skip
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    with contexts[context]:
        before, own, patches = state(), of_model(net, optimizer), attributes()
        try:
            found = vramsweep.estimate(net, batch, optimizer, lost)
            assert lost is loss and found.fits
        except vramsweep.UserError as error:
            assert lost is broken and "raised KeyError" in str(error)
        after, own_after, patches_after = state(), of_model(net, optimizer), attributes()
    assert after == before
    assert own_after == own
    assert {key for key in patches if patches_after.get(key) != patches[key]} == set()


def test_training_goes_on_as_if_nobody_had_asked() -> None:
    def losses(asked: bool) -> list[float]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        batch = torch.randn(8, 16), torch.randint(16, (8,))
        found = []
        for _ in range(4):
            found.append(step(net, optimizer, batch))
            schedule.step()
            if asked:
                vramsweep.estimate(net, batch, optimizer, loss)
            optimizer.zero_grad()
        return found

    assert losses(True) == losses(False)


def test_a_process_group_of_the_user_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    other = dist.new_group([0])
    before = dict(dist.distributed_c10d._world.pg_names), dist.distributed_c10d._world.group_count, dict(os.environ)
    net = nn.Sequential(nn.Linear(8, 8))
    found = vramsweep.estimate(net, torch.zeros(4, 8), world_size=4, sharding="ddp")
    assert any(one.startswith("communication") for one in found.not_covered)
    world = dist.distributed_c10d._world
    assert (dict(world.pg_names), world.group_count, dict(os.environ)) == before
    for group in (None, other):
        dist.all_reduce(summed := torch.ones(2), group=group)
        assert summed.tolist() == [1, 1] and dist.get_world_size(group) == 1
    wrapped = nn.parallel.DistributedDataParallel(net)
    assert vramsweep.estimate(wrapped, torch.zeros(4, 8)).parts["communication"] == 72 * 4  # its bucket
    wrapped(torch.ones(4, 8)).sum().backward()


CRITERION = nn.Bilinear(16, 16, 1)  # a loss with weights of its own, as a notebook's global


def test_the_weights_of_a_loss_and_settings_of_backends_stay() -> None:
    net, inner = nn.Linear(16, 16), CRITERION
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch then refuses to tell the precision of all
    try:
        for lost in (lambda out, x: CRITERION(out, x).mean(), lambda out, x: inner(out, x).mean()):
            optimizer = torch.optim.SGD([*net.parameters(), *inner.parameters()])
            found = vramsweep.estimate(net, torch.zeros(8, 16), optimizer, lost)
            assert found.parts["parameters"] == (16 * 16 + 16 + 16 * 16 + 1) * 4
            assert all(one.grad is None for one in inner.parameters())
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_deterministic_debug_mode(0)
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_weights_are_not_copied() -> None:
    net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(6)))  # 384 MiB
    vramsweep.estimate(nn.Linear(8, 8), torch.zeros(2, 8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = vramsweep.estimate(net, torch.zeros(2, 4096), torch.optim.SGD, gpu="a100-80gb")
    assert found.parts["parameters"] == 6 * 4096 * 4096 * 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
