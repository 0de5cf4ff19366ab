"""A trace of few layers that is lengthened is the trace of all; what is not alike is refused, and traced whole."""

import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import cases, tiny
from traces import A100, SIMULATED

from vramsweep.harness.hardware.roofline import Work, merge_work
from vramsweep.harness.spec import runner_table, trial_parser
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.rank.entry_modules import import_entry
from vramsweep.runners.symbolic import symbolic_shapes
from vramsweep.runners.symbolic.symbolic_candidate import Candidate, verified
from vramsweep.runners.trace.alike_layers import Layered, Lengthened, Unlike, find_layers, lengthen
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic
LAYERS = 9


def trial(layers: int = LAYERS, **over: Any) -> Trial:
    deep = {"model": {"config": {"num_hidden_layers": layers}}}
    return trial_parser.parse(tiny(**(deep | {"device": SIMULATED} | over)))


def layered(asked: Trial, folder: Path) -> Layered:
    tracer = Tracer(A100.capability)
    return find_layers(tracer, make_trace.trace_trial(asked, A100, folder, tracer=tracer)[1])


def described(trace: Trace) -> dict[str, Any]:
    """All of a trace, whatever the order of its makers' names, kernels and calls."""
    values = {field.name: getattr(trace, field.name) for field in fields(Trace)}
    own = {"origins": [trace.makers[origin] for origin in trace.origins], "makers": None}
    return values | own | {name: merge_work(values[name]) for name in ("kernels", "collectives")}


LORA = {"adapter": "lora", "lora_r": 8}


@pytest.mark.parametrize(
    "settings",
    ["{}", *(pytest.param(text, marks=pytest.mark.slow) for (text,) in cases("traces_of_alike_layers"))],
)
def test_the_trace_is_that_of_every_layer(settings: str, tmp_path: Path) -> None:
    asked = trial(**json.loads(settings))
    whole, details = make_trace.trace_trial(asked, A100, tmp_path)
    found = make_trace.trace_alike(asked, lambda few: layered(few, tmp_path))
    assert isinstance(found, Lengthened)
    assert found.details == details | {"layers_traced": 3}
    expected = described(whole)
    for name, value in described(found.trace).items():
        assert value == expected[name], name


@pytest.mark.slow
def test_a_symbolic_trace_is_lengthened_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is confirmed by direct traces of every layer."""
    asked = trial(seq_len=24, micro_batch=3, **LORA)
    found = symbolic_shapes.trace(asked, A100, tmp_path, import_entry(runner_table.module(asked)))
    assert isinstance(found, Candidate), found
    assert "every layer" not in capsys.readouterr().out
    points = {
        Point(length, 3): make_trace.trace_trial(trial(seq_len=length, micro_batch=3, **LORA), A100, tmp_path)
        for length in (24, 40)
    }
    makers = {point: replace(one, makers=[], origins=[]) for point, (one, _) in points.items()}
    own = replace(found.symbolic, template=replace(found.symbolic.template, makers=[], origins=[]))
    direct = {point: (makers[point], details) for point, (_, details) in points.items()}
    assert isinstance(verified(replace(found, symbolic=own), direct), SymbolicTrace)


@pytest.mark.parametrize(("settings", "layers"), cases("trials_of_alike_layers"))
def test_which_trials_have_alike_layers(settings: str, layers: str) -> None:
    assert make_trace.count_alike_layers(trial(**json.loads(settings))) == json.loads(layers)


def test_a_row_says_of_how_many_layers_its_trace_was_made(tmp_path: Path) -> None:
    """Also that of one which does not fit."""
    tight = {"allocator": {"name": "tight", "conf": "per_process_memory_fraction:0.0001"}}
    for layers, said in ((LAYERS, 3), (4, None)):
        for over in ({}, tight):
            asked = trial(layers, **over)
            predicted = predicted_row.predict(asked, *make_trace.trace_layers(asked, A100, tmp_path))
            assert predicted.columns["layers_traced"] == said and (predicted.error is not None) == bool(over)


@pytest.mark.parametrize(("model_type", "config", "layers", "why"), cases("models_of_alike_layers"))
def test_models_whose_layers_are_not_alike(model_type: str, config: str, layers: str, why: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    asked = trial()
    model = asked.model.model_copy(
        update={
            "model_type": model_type,
            "config": {"vocab_size": 64} | (small if model_type != "gpt2" else {}) | json.loads(config),
        }
    )
    one = asked.model_copy(update={"model": model})
    assert make_trace.count_alike_layers(one) == json.loads(layers), why
    if layers != "null":
        few = make_trace.build.read_config(make_trace.with_layers(one, 3))
        assert few.num_hidden_layers == 3


def test_a_longer_trace_that_is_not_alike_is_refused(tmp_path: Path) -> None:
    """A size, an order, a maker, a kernel, what is told of the model: each one that differs."""
    shorter, longer = (layered(trial(layers), tmp_path) for layers in (3, 4))
    lengthen(shorter, longer, LAYERS)
    trace = longer.trace
    middle = len(trace.sizes) // 2
    free = next(at for at, (one, other) in enumerate(pairwise(trace.events)) if one < 0 and other < 0 and at > 900)
    swapped = [*trace.events[:free], trace.events[free + 1], trace.events[free], *trace.events[free + 2 :]]
    wrong = [
        replace(trace, sizes=[*trace.sizes[:middle], trace.sizes[middle] + 512, *trace.sizes[middle + 1 :]]),
        replace(trace, events=swapped),
        replace(trace, categories=[*trace.categories[:-1], "communication"]),
        replace(trace, makers=[one._replace(module="model.layers.1.other") for one in trace.makers]),
        replace(trace, kernels=[(Work("half", 1, 1, 1), 1), *trace.kernels[1:]]),
        replace(trace, notes=[(0, "join", 0, 0)]),
    ]
    for one in [*(replace(longer, trace=one) for one in wrong), replace(longer, details=longer.details | {"x": "y"})]:
        mine = replace(shorter, details=shorter.details | {"x": "z"}) if "x" in one.details else shorter
        with pytest.raises(Unlike):
            lengthen(mine, one, LAYERS)


def test_a_model_that_does_otherwise_with_one_layer_more_is_traced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though its modules are alike: three layers and four are not."""
    from transformers.models.qwen2 import modeling_qwen2

    forward = modeling_qwen2.Qwen2MLP.forward

    def sometimes(self: Any, x: Any) -> Any:
        out = forward(self, x)
        return out * 1.5 if self.config.num_hidden_layers % 2 else out

    asked = trial(precision="bf16")
    assert asked.model.model_type == "qwen2"
    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", sometimes)
    whole, _ = make_trace.trace_trial(asked, A100, tmp_path)
    found, _ = make_trace.trace_layers(asked, A100, tmp_path)
    assert "every layer is traced" in capsys.readouterr().out
    assert found == whole
