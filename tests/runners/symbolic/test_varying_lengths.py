"""Runs whose lengths vary: measured against the tensors themselves, predicted against traces of those very lengths."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Run, refusal, source, tiny
from traces import A100, SIMULATED

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages.errors import EnvironmentFault
from vramsweep.harness.spec import length_distribution, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.runners.loops import custom as custom_target
from vramsweep.runners.loops import hf_trainer, torch_loop
from vramsweep.runners.measure.rank_instruments import Gauges
from vramsweep.runners.measure.step_meter import OTHER_STEPS, Meter, meter_spec
from vramsweep.runners.model import build
from vramsweep.runners.predict import make_trace, trace_cache
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.symbolic import varying_lengths
from vramsweep.runners.trace.symbolic_trace import Point
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")
DATA = "lengths:lognormal(12,0.7)"
RUNNERS: dict[str, Any] = {"torch": torch_loop, "trainer": hf_trainer}
ONE_PASS = (20, 7, 9, 32, 3, 5)
TWO_PASSES = (20, 7, 9, 32, 24, 2, 3, 5, 31, 30, 8, 1)
FALLING = tuple(range(31, 0, -1))


OWN_STEP = source("target_with_a_step.txt")


def tried(**over: Any) -> trials.Trial:
    return trial_parser.parse(tiny(data=DATA) | over)


def documents(monkeypatch: pytest.MonkeyPatch, *given: int) -> None:
    """These lengths, over and over, where they differ: a trial that stands in for one of its batches keeps its own."""
    real = length_distribution.drawn

    def drawn(what: Any, *rest: Any) -> Iterator[int]:
        return real(what, *rest) if what.at(0.1) == what.at(0.9) else itertools.cycle(given)

    monkeypatch.setattr(length_distribution, "drawn", drawn)


class Watched(Meter):
    """Notes each pass's tensors."""

    def __init__(self, trial: trials.Trial, folder: Path) -> None:
        super().__init__(meter_spec(trial), folder, Gauges(CPU), 0)
        self.passes: list[tuple[int, dict[str, torch.Tensor]]] = []

    def fed(self, batch: Any) -> None:
        super().fed(batch)
        self.passes.append((self.index, dict(batch)))


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "padding_to"), [("torch", "longest"), ("torch", "max"), ("trainer", "8")])
def test_tokens_are_those_of_the_tensors(runner: str, padding_to: str, tmp_path: Path) -> None:
    trial = tried(runner={"name": runner}, padding_to=padding_to, grad_accum=2, padding_side="left")
    meter = Watched(trial, tmp_path)
    RUNNERS[runner].run(trial, CPU, meter, tmp_path)
    row = meter.columns()
    of_step: dict[int, list[dict[str, torch.Tensor]]] = {}
    for step, batch in meter.passes:
        of_step.setdefault(step, []).append(batch)
        mask, ids, labels = batch["attention_mask"], batch["input_ids"], batch["labels"]
        assert mask.shape == ids.shape == labels.shape
        assert ((labels == -100) == (mask == 0)).all()
        assert (mask.diff(dim=1) >= 0).all()  # padding stands before the text
        widest = int(mask.sum(1).max())
        assert ids.shape[1] == {"longest": widest, "8": -(-widest // 8) * 8, "max": 32}[padding_to]
    measured = [of_step[step] for step in (2, 3)]  # after a warm-up and the probe
    tokens = [sum(batch["input_ids"].numel() for batch in step) for step in measured]
    assert row["step_tokens"] == tokens
    assert row["tokens_per_s"] == pytest.approx(sum(tokens) / row["elapsed_s"])
    assert row["samples_per_s"] == pytest.approx(8 / row["elapsed_s"])
    kept = sum(int(batch["attention_mask"].sum()) for step in measured for batch in step)
    assert row["padding_fraction"] == pytest.approx(1 - kept / sum(tokens))
    assert row["longest_document"] == max(int(b["attention_mask"].sum(1).max()) for s in measured for b in s)
    assert row["step_reserved_bytes"] is row["step_allocated_bytes"] is None  # no caching allocator here
    uneven = padding_to != "max"  # only the probe step's tensors are counted
    assert (row["peak_allocated_bytes"] is None) == (OTHER_STEPS in (row["notes"] or ())) == uneven
    assert row["forward_peak_allocated_bytes"] > 0 and row["step_peak_allocated_bytes"] is None
    counted = sum(batch["input_ids"].numel() for batch in of_step[4])
    assert meter.count.tokens == counted and row["hardware_flops_per_token"] * counted == meter.count.total


@pytest.mark.slow
def test_both_runners_train_on_the_same_lengths(tmp_path: Path) -> None:
    shapes = []
    for runner, module in RUNNERS.items():
        trial = tried(runner={"name": runner})
        (tmp_path / runner).mkdir()
        meter = Watched(trial, tmp_path / runner)
        module.run(trial, CPU, meter, tmp_path / runner)
        shapes.append([batch["attention_mask"].sum(1).tolist() for _, batch in meter.passes])
    assert shapes[0] == shapes[1]
    drawn = [sum(one) for one in length_distribution.documents(tried(), 10)]
    assert [length for batch in shapes[0] for length in batch] == drawn


@pytest.mark.slow
def test_a_job_resumes_with_the_same_lengths(run_sweep: Run) -> None:
    job = {"name": "job", "warmup_steps": 1, "measured_steps": 2, "job": True}
    (row,) = run_sweep(tiny(data=DATA, runner={"name": "trainer"}, protocol=job))
    assert row["outcome"] == "ok" and {"save", "resume"} <= row["part_peak_allocated_bytes"].keys(), row["notes"]


def test_a_custom_target_has_the_columns_of_its_batches(tmp_path: Path) -> None:
    target = tmp_path / "target.py"
    target.write_text(OWN_STEP)
    trial = tried(runner={"name": "custom", "target": f"{target}:build"})
    meter = Watched(trial, tmp_path)
    custom_target.run(trial, CPU, meter, tmp_path)
    row = meter.columns()
    assert {
        name: row[name] for name in length_distribution.length_columns(trial)
    } == length_distribution.length_columns(trial)


def test_a_file_that_has_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    """This holds when its lengths are read, and wherever a file of another kind is read."""
    of_lengths, target = tmp_path / "lengths", tmp_path / "target.py"
    of_lengths.write_text("9\n")
    target.write_text("def build(trial): ...\n")
    trial = tried(data=f"lengths:{of_lengths}")
    other = trial_parser.parse(tiny(runner={"name": "custom", "target": f"{target}:build"}))
    assert length_distribution.documents(trial, 1) == [(9,)]
    build.prepare(trial)
    build.prepare(other)
    of_lengths.write_text("7\n8\n")
    target.write_text("def build(trial): pass\n")
    for read in (
        lambda: length_distribution.documents(trial, 1),
        lambda: build.prepare(trial),
        lambda: build.prepare(other),
    ):
        assert "has changed since the sweep was planned; run the sweep again" in refusal(EnvironmentFault, read)
    of_lengths.unlink()
    assert "has changed" in refusal(EnvironmentFault, length_distribution.documents, trial, 1)
    of_lengths.write_text("9\n")
    assert length_distribution.documents(trial, 1) == [(9,)]


def test_packed_documents_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    documents(monkeypatch, 20, 30)
    first, second = (build.data(tried(packing="documents")).samples[n] for n in (0, 1))
    assert first["position_ids"].tolist() == [*range(20), *range(12)]
    assert second["position_ids"].tolist() == [*range(18), *range(14)]
    assert (second["labels"] == -100).nonzero().flatten().tolist() == [0, 18]
    wrapped = build.data(tried(packing="wrapped")).batch(0, 2)
    assert wrapped["input_ids"].shape == (2, 32) and "position_ids" not in wrapped


def sequence(
    trial: trials.Trial, folder: Path, *steps: Sequence[length_distribution.Batch]
) -> tuple[varying_lengths.Sized, Any]:
    """Loading and these steps, each pass from a direct trace of its own length."""
    family = directly(trial, folder)
    load = family.load(trial, steps[0][0])
    return load, iter([family.step(trial, number, step)[0] for number, step in enumerate(steps)])


TRACED: dict[str, Any] = {}  # each point once


class Direct:
    """A curve whose every point is traced itself."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.module, self.folder = module, folder

    def formulas(self, where: Point) -> None:
        return None

    def at(self, trial: trials.Trial) -> tuple[Trace, dict[str, Any], str]:
        key = trace_cache.trace_key(trial, A100)
        if key not in TRACED:
            TRACED[key] = make_trace.trace_trial(trial, A100, self.folder, self.module)
        return *TRACED[key], "traced"


def followed(
    trial: trials.Trial, folder: Path, batches: Sequence[length_distribution.Batch], conf: str = ""
) -> varying_lengths.Run:
    return varying_lengths.replay(
        *sequence(trial, folder, *([one] for one in batches)), allocator_config.parse(conf), None
    )


def directly(trial: trials.Trial, folder: Path) -> varying_lengths.TraceFamily:
    """Every batch of the trial from a direct trace of its own length."""
    module = RUNNERS[trial.runner.name]
    return varying_lengths.TraceFamily({padded: Direct(module, folder) for padded in (True, False)})  # type: ignore[arg-type]


def shapes(trial: trials.Trial, steps: int) -> list[length_distribution.Batch]:
    return [batch for step in length_distribution.batches(trial, steps) for batch in step]


Widths = tuple[tuple[int, ...], ...]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "given", "widths"),
    [
        *(
            ({"runner": {"name": runner}, "allocator": {"name": "a", "conf": conf}}, ONE_PASS, ((20,), (32,), (5,)))
            for runner, conf in (("torch", ""), ("torch", "expandable_segments:True"), ("trainer", ""))
        ),
        # some are aligned and some are not, whose kernels differ; the second step is the other way round
        *(
            ({"runner": {"name": runner}, "grad_accum": 2}, TWO_PASSES, ((20, 32), (24, 5), (31, 8)))
            for runner in ("torch", "trainer")
        ),
        # buckets are made anew in the second step, also where a pass before leaves gradients alone
        ({"sharding": "ddp", "world_size": 2}, FALLING, ((31,), (27,), (23,))),
        ({"sharding": "ddp", "world_size": 2, "grad_accum": 2}, FALLING, ((31, 27), (23, 19), (15, 11))),
        ({"micro_batch": 1}, (9, 1, 32), ((9,), (1,), (32,))),
    ],
    ids=str,
)
def test_steps_of_several_lengths_are_those_of_a_trace_of_these_lengths(
    over: dict[str, Any], given: tuple[int, ...], widths: Widths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three steps traced as they are, against three traces of one length each."""
    documents(monkeypatch, *given)
    trial = tried(device=SIMULATED, **over)
    config = allocator_config.parse(trial.allocator.conf)
    truth = replay(make_trace.trace_trial(trial, A100, tmp_path, RUNNERS[trial.runner.name])[0], config, None)
    steps = varying_lengths.passes(trial)[:3]
    assert tuple(tuple(one.width for one in step) for step in steps) == widths
    monkeypatch.undo()
    found = varying_lengths.replay(*sequence(trial, tmp_path, *steps), config, None).predicted
    assert [p for _, p in found.phases] == [p for _, p in truth.phases]
    assert (found.peak, found.final, found.breakdown) == (truth.peak, truth.final, truth.breakdown)


@pytest.mark.slow
def test_what_a_single_token_leaves_is_said(tmp_path: Path) -> None:
    batches = [length_distribution.Batch(1, width, width) for width in (9, 1, 32)]
    with pytest.raises(trials.InvalidTrial, match=r"steps of 1 x 1 tokens keep .* \(try padding_to=8\)"):
        followed(tried(device=SIMULATED, micro_batch=1, runner={"name": "trainer"}), tmp_path, batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "padded"), [({}, True), ({}, False), ({"sharding": "ddp", "world_size": 2}, True)], ids=str
)
def test_equal_lengths_need_what_one_length_needs(over: dict[str, Any], padded: bool, tmp_path: Path) -> None:
    """Also where buckets are made anew once, which are held once."""
    batch = length_distribution.Batch(2, 24, 30 if padded else 48)
    trial = tried(device=SIMULATED, **over)
    long = followed(trial, tmp_path, [batch] * 7)
    one = varying_lengths.representative_trial(trial, padded, Point(24, 2))
    truth = replay(make_trace.trace_trial(one, A100, tmp_path, torch_loop)[0], AllocatorConfig(), None)
    assert long.predicted.peak == truth.peak
    ends: Sequence[Any] = [allocated for allocated, _ in long.ends[1:]] if over else long.ends
    assert len(set(ends)) == 1
    assert over or long.predicted.breakdown == truth.breakdown
    of_step = [[peaks for mark, peaks in long.predicted.phases if mark.step == step] for step in range(7)]
    assert of_step[2:] == [of_step[-1]] * 5


@pytest.mark.slow
def test_expandable_segments_hold_less_where_lengths_grow(tmp_path: Path) -> None:
    """Each longer step finds no block large enough among those of the steps before; pages can be mapped anew."""
    trial = tried(device=SIMULATED, micro_batch=64)
    batches = [length_distribution.Batch(64, width, 64 * width - 1) for width in (40, 150, 310, 500)]
    default, expandable = (followed(trial, tmp_path, batches, conf) for conf in ("", "expandable_segments:True"))
    assert expandable.predicted.peak["allocated"] <= default.predicted.peak["allocated"]
    assert expandable.ends[-1][1] < 0.9 * default.ends[-1][1]
    reserved = [end[1] for end in default.ends]
    assert reserved == sorted(reserved)  # nothing is given back


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_named(tmp_path: Path) -> None:
    trial = tried(device=SIMULATED, micro_batch=64)
    batches = [length_distribution.Batch(64, width, 64 * width - 1) for width in (40, 150, 500, 150)]
    run = varying_lengths.replay(*sequence(trial, tmp_path, *([one] for one in batches)), AllocatorConfig(), 600 << 20)
    refused = run.predicted.refused
    assert refused is not None and run.asked is not None
    assert refused.mark.step == run.asked.step == 2 and len(run.ends) == 2
    assert sum(refused.parts.values()) == refused.allocated + refused.request
    assert run.predicted.phases[-1][0].phase == refused.mark.phase


@pytest.mark.slow
def test_the_row_has_the_probe_step_and_every_measured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the replay's own phases, step by step; each length differs, so that no step stands for another."""
    monkeypatch.setattr(varying_lengths.allocator_config, "without_effect", lambda config: [])
    documents(monkeypatch, 289, 64, 640, 224, 384, 160, 1024, 96, 512, 256, 768, 768)
    trial = tried(device=SIMULATED, seq_len=1024, protocol={"name": "p", "warmup_steps": 1, "measured_steps": 4})
    batches = shapes(trial, 6)
    assert [(one.width, one.padded) for one in batches] == [
        (289, True), (640, True), (384, True), (1024, True), (512, True), (768, False)
    ]  # fmt: skip
    row = varying_lengths.predict(trial, directly(trial, tmp_path)).columns
    run = followed(trial, tmp_path, batches)

    def peak(counter: str, step: int, *phases: str) -> int:
        every = [(mark, peaks[counter]) for mark, peaks in run.predicted.phases if mark.step == step]
        return max(value for mark, value in every if not phases or mark.phase in phases)

    measured = range(2, 6)
    for counter in ("allocated", "reserved"):
        assert row[f"step_peak_{counter}_bytes"] == [peak(counter, step) for step in measured]
        for phase in ("forward", "backward", "optimizer"):
            assert row[f"{phase}_peak_{counter}_bytes"] == peak(counter, 1, phase)  # of the probe step
    assert row["step_peak_allocated_bytes"] != row["step_peak_reserved_bytes"]
    assert row["forward_peak_allocated_bytes"] != peak("allocated", 0, "forward")
    held = [allocated for allocated, _ in run.ends[2:]]
    assert row["step_allocated_bytes"] == held and len(set(held)) == 4
    assert row["step_reserved_bytes"] == [reserved for _, reserved in run.ends[2:]]
    assert row["step_growth_bytes"] == min(after - before for before, after in itertools.pairwise(held))
    assert row["step_tokens"] == [one.tokens for one in batches[2:]]
    widest = make_trace.trace_trial(
        varying_lengths.representative_trial(trial, True, Point(1024, 2)), A100, tmp_path, torch_loop
    )
    assert row["attention_kernels"] == sorted({*widest[1]["attention_kernels"], *kernels(trial, tmp_path, batches)})
    assert row["attention_kernels"] and varying_lengths.UNTIMED in row["notes"]


def kernels(trial: trials.Trial, folder: Path, batches: Sequence[length_distribution.Batch]) -> set[str]:
    """Attention's kernels of these batches."""
    family = directly(trial, folder)
    return {kernel for one in batches for kernel in family.details(trial, [one])[1]["attention_kernels"]}


@pytest.mark.slow
def test_details_are_of_the_widest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents(monkeypatch, 9, 2, 20, 7, 12, 5, 32, 3, 16, 8, 24, 24)
    trial = tried(device=SIMULATED, protocol={"name": "p", "warmup_steps": 1, "measured_steps": 4})
    family = directly(trial, tmp_path)
    with mock.patch.object(family, "details", wraps=family.details) as asked:
        varying_lengths.predict(trial, family)
    assert max(one.width for one in asked.call_args_list[0].args[1]) == 32


@pytest.mark.slow
def test_the_reason_names_the_batch_and_a_card_that_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents(monkeypatch, 9, 2, 20, 7, 12, 5, 32, 3, 16, 8, 24, 24)
    trial = tried(device=SIMULATED, protocol={"name": "p", "warmup_steps": 1, "measured_steps": 4})
    batches = shapes(trial, 6)
    free = followed(trial, tmp_path, batches).predicted
    before = max(peaks["allocated"] for mark, peaks in free.phases if mark.step is not None and mark.step < 3)
    assert before < free.peak["allocated"]  # of step 3
    limits = {"a100-80gb": before + 1024}
    monkeypatch.setattr(varying_lengths, "memory_limit", lambda gpu: limits.get(gpu.name, free.peak["reserved"] - 1))
    monkeypatch.setattr(varying_lengths.predicted_row, "refused_text", lambda *_: "full")
    predicted = varying_lengths.predict(trial, directly(trial, tmp_path))
    assert predicted.error is not None
    at = predicted.phases[-1][0].step
    assert at is not None and at <= 3
    assert f"that step's batch is 2 x {batches[at].width} tokens" in str(predicted.error)
    assert predicted.columns["unlimited_peak_reserved_bytes"] == free.peak["reserved"]


def test_a_smaller_card_is_named_where_the_run_fits_it() -> None:
    card = gpu_lookup.gpu_named("t4-16gb")
    fitting = varying_lengths._smaller(card, 60 << 30, lambda gpu: gpu_lookup.memory_limit(gpu) > 20 << 30)
    assert (
        fitting is not None and 20 << 30 < gpu_lookup.memory_limit(fitting) < 24 << 30 and fitting.capability >= (8, 0)
    )
    assert varying_lengths._smaller(card, 60 << 30, lambda gpu: False) is None
    assert varying_lengths._smaller(card, 1 << 30, lambda gpu: True) is None  # what it needs without a limit is less


@pytest.mark.slow
def test_rows_of_a_sweep(run_sweep: Run) -> None:
    """Many lengths, from symbolic traces; two settings share them. One that does not fit says at which step."""
    over = {"data": DATA, "device": SIMULATED, "seq_len": 48, "protocol": {"measured_steps": 30}}
    rows = run_sweep(tiny(**over), tiny(**over, allocator={"name": "expandable", "conf": "expandable_segments:True"}))
    trial = trial_parser.parse(tiny(**over))
    measured = length_distribution.batches(trial, 32)[2:]
    for row in rows:
        assert row["outcome"] == "ok" and row["isolation"] == "shared"
        assert row["step_tokens"] == [batch.tokens for (batch,) in measured]
        assert "symbolic" in row["trace_basis"]
        assert len(row["step_reserved_bytes"]) == 30 and row["tokens_per_s"] is None
        assert row["padding_fraction"] == length_distribution.length_columns(trial)["padding_fraction"]
    assert rows[0]["step_peak_allocated_bytes"] == rows[1]["step_peak_allocated_bytes"]
