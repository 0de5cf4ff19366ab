"""Every storage of a trace names the module and the operator that asked for it, and no trace changes for it."""

import contextlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from traces import most_held, traced, traced_once

from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.storage_origins import Origins
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic


def made(trace: Trace) -> Counter[tuple[str, str]]:
    return Counter(trace.makers[origin][:2] for origin in trace.origins)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Net(torch.nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.blocks, self.how = torch.nn.ModuleList(Block() for _ in range(2)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return x.exp()


def trace_net(how: str = "", wrap: Any = lambda net: net) -> Trace:
    tracer = Tracer((8, 0))
    with tracer.record():
        net = wrap(Net(how))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        tracer.built()
        net(torch.randn(8, 64, requires_grad=True)).sum().backward()
        optimizer.step()
        tracer.mark(0, "optimizer")
    return tracer.trace


def test_modules_backward_optimizer_and_parameters_are_named() -> None:
    found = made(trace_net())
    for number in (0, 1):
        for name in ("up", "down"):
            path = f"blocks.{number}.{name}"
            assert found[path, "aten.addmm"] == 1
            assert found[path, "aten.mm (backward)"] == 2
            assert found[f"{path}.weight", "aten.empty"] == 1
        assert found[f"blocks.{number}", "aten.relu"] == 1
        assert found[f"blocks.{number}", "aten.threshold_backward (backward)"] == 1
    assert found["Net", "aten.exp"] == 1
    assert found["", "aten.sum"] == 1
    assert found["", "aten.ones_like"] == 1  # the loss's own gradient, which torch.autograd.backward makes
    assert found["optimizer", "aten.clone"] == 8
    assert found["blocks.0.up", "cuBLAS workspace"] == 1
    assert found["blocks.1.down", "cuBLAS workspace (backward)"] == 1


@pytest.mark.parametrize("how", ["reentrant", "not"])
def test_what_is_recomputed_belongs_to_its_module(how: str) -> None:
    found = made(trace_net(how))
    for number in (0, 1):
        path = f"blocks.{number}.up"
        assert found[path, "aten.addmm"] == found[path, "aten.addmm (recomputed)"] == 1
        assert found[path, "aten.mm (backward)"] == 2
        assert found[f"blocks.{number}", "aten.relu (recomputed)"] == 1
        assert found[f"blocks.{number}", "aten.threshold_backward (backward)"] == 1


WIDE, NARROW = 8 * 256 * 4, 8 * 64 * 4  # bytes of what a block's two layers return
KEEPS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.parametrize(("act", "way", "kept"), [
    (functional.gelu, {"use_reentrant": False}, 2 * WIDE),  # its input and its result
    (functional.relu, {"use_reentrant": False}, WIDE),  # its result; its input is a temporary
    (functional.gelu, {"use_reentrant": True}, 2 * WIDE + NARROW),  # computes the block's result again too
    (functional.gelu, {"use_reentrant": False, "context_fn": KEEPS}, WIDE),  # its input is an activation
])  # fmt: skip
def test_what_one_block_saves_again_is_a_category(act: Any, way: dict[str, Any], kept: int) -> None:
    def call(x: torch.Tensor, up: torch.nn.Linear, down: torch.nn.Linear) -> torch.Tensor:  # no module runs in it
        return functional.linear(act(functional.linear(x, up.weight, up.bias)), down.weight, down.bias)

    tracer = Tracer((8, 0))
    with tracer.record():
        blocks, x = Net().blocks, torch.randn(8, 64, requires_grad=True)
        for block in blocks:
            x = checkpoint(call, x, block.up, block.down, **way)
        x.sum().backward()
    each = zip(tracer.trace.categories, tracer.trace.sizes, strict=True)
    assert sum(size for name, size in each if name == "recomputed_activations") == 2 * kept
    assert most_held(tracer.trace)["recomputed_activations"] == kept  # of one block at a time


def line_of(code: str) -> str:
    """The line of this file that contains the text, found by reading the file."""
    text = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(n for n, line in enumerate(text, 1) if code in line)}"


@pytest.mark.parametrize("how", ["", "reentrant", "not"])
def test_lines_are_those_of_the_model_and_of_the_forward_operator_for_its_gradients(how: str) -> None:
    lines: dict[tuple[str, str], set[str]] = {}
    for maker in trace_net(how).makers:
        lines.setdefault(maker[:2], set()).add(maker.line)
    block, net, step = line_of("self.down(self.up(x)"), line_of("return x.exp()"), line_of("net(torch.randn(8")
    assert lines["Net", "aten.exp"] == lines["Net", "aten.mul (backward)"] == {net}
    for path in ("blocks.0.up", "blocks.1.down"):
        assert lines[path, "aten.addmm"] == lines[path, "aten.mm (backward)"] == {block}
        assert lines[f"{path}.weight", "aten.empty"] == {line_of("torch.nn.Linear(64, 256)")}
    assert lines["blocks.1", "aten.threshold_backward (backward)"] == {block}
    assert not how or lines["blocks.1", "aten.relu (recomputed)"] == {block}
    assert lines["", "aten.sum"] == lines["", "aten.ones_like"] == {step}
    assert lines["optimizer", "aten.clone"] == {line_of("optimizer.step()")}


def test_a_gradient_of_a_slice_that_was_written_has_its_own_line() -> None:
    tracer = Tracer((8, 0))
    with tracer.record():
        x = torch.randn(8, 64, requires_grad=True) * 2
        x[:, 0] = x[:, 1].exp()  # this makes a node after its operator
        x.sum().backward()
    written = {maker.line for maker in tracer.trace.makers if maker.operator == "aten.new_empty_strided (backward)"}
    assert written == {line_of("this makes a node")}


def test_what_only_wraps_has_no_name() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Outer(torch.nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.module = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    def wrap(net: Net) -> torch.nn.Module:
        net.blocks[0] = checkpoint_wrapper(net.blocks[0])
        return net

    assert made(trace_net(wrap=wrap))["blocks.0.up", "aten.addmm"] == 1
    assert made(trace_net(wrap=Outer))["module.blocks.0.up", "aten.addmm"] == 1  # the user's own module keeps its name


def test_a_module_that_fails_leaves_nothing_behind() -> None:
    class Failing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    origins, net = Origins(), torch.nn.Sequential(torch.nn.Linear(4, 4), Failing())
    with origins.watch():
        with pytest.raises(ValueError, match="no"):
            net(torch.ones(1, 4))
        assert origins.maker("aten.mm")[:2] == ("", "aten.mm")
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.slow
@pytest.mark.parametrize("over", [{"checkpointing": "full"}, {"precision": "fp16", "grad_accum": 2}])
def test_a_trace_is_the_same_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: Any) -> None:
    named = traced(tmp_path, **over)
    monkeypatch.setattr("vramsweep.runners.trace.storage_origins.register_module_forward_pre_hook", _no_hook)
    monkeypatch.setattr("vramsweep.runners.trace.storage_origins.register_module_forward_hook", _no_hook)
    plain = traced(tmp_path, **over)
    assert len({maker.module for maker in named.makers}) > 30 > len({maker.module for maker in plain.makers})
    for part in ("events", "sizes", "categories", "streams", "marks", "kernels", "notes", "host"):
        assert getattr(named, part) == getattr(plain, part)


def _no_hook(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


def test_a_large_share_of_a_step_has_a_module() -> None:
    trace = traced_once()
    steps = {event - 1 for event in trace.events[trace.marks[0].end :] if event > 0}
    nameless = [n for n in steps if not trace.makers[trace.origins[n]][0]]
    assert sum(trace.sizes[n] for n in nameless) < 0.01 * sum(trace.sizes[n] for n in steps)
    assert made(trace)["model.layers.1.self_attn.q_proj", "aten.mm (backward)"]
    assert made(trace)["model.embed_tokens.weight", "aten.empty"]  # one tensor, also the head's
