"""Test the observer in this process: what it records of odd scripts, and what they notice of it."""

import gc
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from vramsweep.runners.measure.rank_instruments import Gauges
from vramsweep.runners.scripts import observer as module
from vramsweep.runners.scripts.observation_files import WATCH
from vramsweep.runners.scripts.observer import Observer

Started = Callable[..., Observer]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    every: list[Observer] = []
    gc.collect()  # tensors of other tests, as every one alive is looked at: one kind runs out of memory when asked

    def start(**asked: Any) -> Observer:
        said = {"warmup_steps": 1, "measured_steps": None, "record": False, "stop": False, "job": False}
        said |= {"precision": None, "worker": os.getpid(), "variables": {}}
        (tmp_path / WATCH).write_text(json.dumps(said | asked))
        every.append(Observer(tmp_path))
        every[-1].install()
        return every[-1]

    yield start
    for one in every:
        one.uninstall()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = torch.nn.Embedding(50, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids).flatten(0, 1)))  # type: ignore[no-any-return]


def train(net: Any, steps: int, each: Callable[[int], object] = lambda step: None) -> None:
    weights = net.parameters() if isinstance(net, torch.nn.Module) else NET.parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for step in range(steps):
        each(step)
        net(torch.randint(0, 50, (2, 8))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


NET = Net()


def test_no_room_for_what_is_written_does_not_reach_the_script(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = started()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def fill(step: int) -> None:
        if step == 3:
            assert observer.meter is not None
            monkeypatch.setattr(observer.meter, "_write", full)
            monkeypatch.setattr(Path, "write_text", full)

    train(Net(), 6, fill)
    assert observer.done
    assert "No space left" in str(observer.problem)


@pytest.mark.slow
def test_a_training_that_is_compiled_is_nowhere_run_without_it(started: Started) -> None:
    observer = started()
    ran: list[bool] = []

    class Told(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                ran.append(True)  # by Python, and not by what was compiled of it
            return super().forward(ids)

    train(torch.compile(Told(), backend="aot_eager"), 8)
    observer.block_ended()
    said = json.loads(observer.file.read_text())
    assert (ran, said["problem"], said["steps"]) == ([], None, 8)
    assert said["batches"] == [1]  # what the compiler differentiates while it traces is no pass of the script's
    assert said["columns"]["hardware_flops_per_token"] is None
    assert any("compiled code" in note for note in said["columns"]["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_that_is_compiled_whole_meets_nothing_of_ours(started: Started, backend: str) -> None:
    observer = started()
    train(NET, 1)  # its class is known by now

    @torch.compile(backend=backend, fullgraph=True)
    def loss(ids: torch.Tensor) -> torch.Tensor:
        return NET(ids).pow(2).sum()  # type: ignore[no-any-return]

    train(loss, 7)
    observer.block_ended()
    said = json.loads(observer.file.read_text())
    assert (said["problem"], said["steps"], said["backwards"]) == (None, 8, 8)


def test_batch_norms_that_are_frozen_in_each_step_evaluate_nothing(started: Started) -> None:
    observer = started(job=True)
    net = Net()

    def freeze(step: int) -> None:
        net.train()
        net.norm.eval()

    train(net, 6, freeze)
    assert observer.gauges is not None
    assert set(observer.gauges.parts) == {"load", "first_step", "steps"}
    net.eval()
    with torch.no_grad():
        net(torch.randint(0, 50, (2, 8)))
    observer.block_ended()
    assert "evaluation" in observer.gauges.parts


def test_a_scaler_with_an_update_of_its_own_still_tells_what_it_skips(started: Started) -> None:
    class Sharded(torch.amp.GradScaler):  # as FSDP's is
        def update(self, new_scale: Any = None) -> None:
            for state in self._per_optimizer_states.values():
                state.clear()
            self._per_optimizer_states.clear()
            self._per_optimizer_states.default_factory = torch.amp.grad_scaler._refresh_per_optimizer_state  # type: ignore[attr-defined]

    observer = started()
    net = Net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), Sharded("cpu", init_scale=1.0)
    for step in range(6):
        loss = net(torch.randint(0, 50, (2, 8))).sum()
        scaler.scale(loss * (float("inf") if step == 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (observer.counts["steps"], observer.skips) == (6, 1)


class Graph:
    """In place of torch.cuda.CUDAGraph, which needs a card."""

    def capture_begin(self, refused: bool = False) -> None:
        if refused:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


def test_what_is_captured_in_a_graph_is_let_alone_and_its_replay_noticed(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    observer = started()
    graph: Any = torch.cuda.CUDAGraph()
    net = Net()
    train(net, 2)
    before = dict(observer.counts)
    graph.capture_begin()
    train(net, 1)
    graph.capture_end()
    assert observer.counts == before
    assert observer.meter is not None
    assert not observer.meter.graphed
    graph.replay()
    assert observer.meter.graphed
    with pytest.raises(RuntimeError):
        graph.capture_begin(refused=True)
    train(net, 1)
    assert observer.counts["steps"] == 3


class Kept(torch.nn.Linear):
    found: tuple[bool, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        Kept.found += ("__call__" in vars(Kept),)
        return self.__dict__


def test_a_class_is_saved_as_it_was(started: Started) -> None:
    started()
    net = Kept(4, 4)
    for _ in range(3):
        net(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert "__call__" in vars(Kept)
    torch.save(net, io.BytesIO())
    assert Kept.found == (False,)
    assert "__call__" in vars(Kept)


def test_a_job_that_resumes_is_measured_where_its_parameters_are(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = started(job=True)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(4, device="cuda:1"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
    looked: list[Any] = []
    monkeypatch.setattr(observer, "look", lambda held: looked.extend(held) or Gauges(torch.device("cpu"), os.getpid()))
    observer.loads_state(optimizer, {"state": {0: {}}})
    assert module._device(looked) == torch.device("cuda:1")


def test_losses_that_hold_gradients_are_no_third_of_the_flops(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", object())
    observer = started()
    train(Net(), 2)
    assert observer.meter is not None
    assert observer.meter.count.uneven
