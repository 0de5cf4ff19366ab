"""Runs whose lengths vary: measured against the tensors themselves, predicted against traces of those very lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, tiny

from vramsweep.harness import gpus, lengths
from vramsweep.harness import trial as trials
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.errors import EnvironmentFault
from vramsweep.runners import build, torch_loop, tracing, varying
from vramsweep.runners import custom as custom_target
from vramsweep.runners import trainer as hf_trainer
from vramsweep.runners.gauges import Gauges
from vramsweep.runners.measure import OTHER_STEPS, Meter, asked
from vramsweep.runners.predict import replay
from vramsweep.runners.symbolic import Point
from vramsweep.runners.trace import Trace

CPU = torch.device("cpu")
GPU = gpus.named("a100-80gb")
SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}
DATA = "lengths:lognormal(12,0.7)"
RUNNERS: dict[str, Any] = {"torch": torch_loop, "trainer": hf_trainer}


OWN_STEP = """
import torch

def build(trial):
    net = torch.nn.Linear(1, 1)
    return net, torch.optim.SGD(net.parameters()), lambda batch: net(batch["input_ids"][:, :1].float()).sum().backward()
"""


def tried(**over: Any) -> trials.Trial:
    return trials.parse(tiny(data=DATA) | over)


def documents(monkeypatch: pytest.MonkeyPatch, *given: int) -> None:
    """These lengths, over and over, where they differ: a trial that stands in for one of its batches keeps its own."""
    real = lengths.drawn

    def drawn(what: Any, *rest: Any) -> Iterator[int]:
        return real(what, *rest) if what.at(0.1) == what.at(0.9) else itertools.cycle(given)

    monkeypatch.setattr(lengths, "drawn", drawn)


class Watched(Meter):
    """Notes each pass's tensors."""

    def __init__(self, trial: trials.Trial, folder: Path) -> None:
        super().__init__(asked(trial), folder, Gauges(CPU), 0)
        self.passes: list[tuple[int, dict[str, torch.Tensor]]] = []

    def fed(self, batch: Any) -> None:
        super().fed(batch)
        self.passes.append((self.index, dict(batch)))


@pytest.mark.parametrize("runner", ["torch", "trainer"])
@pytest.mark.parametrize("padding_to", ["longest", "8", "max"])
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
    drawn = [sum(one) for one in lengths.documents(tried(), 10)]
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
    assert {name: row[name] for name in lengths.seen(trial)} == lengths.seen(trial)


def test_a_file_that_has_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    """Where its lengths are read, and wherever a file of another kind is."""
    of_lengths, target = tmp_path / "lengths", tmp_path / "target.py"
    of_lengths.write_text("9\n")
    target.write_text("def build(trial): ...\n")
    trial = tried(data=f"lengths:{of_lengths}")
    other = trials.parse(tiny(runner={"name": "custom", "target": f"{target}:build"}))
    assert lengths.documents(trial, 1) == [(9,)]
    build.prepare(trial)
    build.prepare(other)
    of_lengths.write_text("7\n8\n")
    target.write_text("def build(trial): pass\n")
    for read in (lambda: lengths.documents(trial, 1), lambda: build.prepare(trial), lambda: build.prepare(other)):
        with pytest.raises(EnvironmentFault, match="has changed since the sweep was planned; run the sweep again"):
            read()
    of_lengths.unlink()
    with pytest.raises(EnvironmentFault, match="has changed"):
        lengths.documents(trial, 1)
    of_lengths.write_text("9\n")
    assert lengths.documents(trial, 1) == [(9,)]


def test_packed_documents_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    documents(monkeypatch, 20, 30)
    first, second = (build.data(tried(packing="documents")).samples[n] for n in (0, 1))
    assert first["position_ids"].tolist() == [*range(20), *range(12)]
    assert second["position_ids"].tolist() == [*range(18), *range(14)]
    assert (second["labels"] == -100).nonzero().flatten().tolist() == [0, 18]
    wrapped = build.data(tried(packing="wrapped")).batch(0, 2)
    assert wrapped["input_ids"].shape == (2, 32) and "position_ids" not in wrapped


def sequence(trial: trials.Trial, folder: Path, *steps: Sequence[lengths.Batch]) -> tuple[varying.Sized, Any]:
    """Loading and these steps, each pass from a direct trace of its own length."""
    module = RUNNERS[trial.runner.name]
    family = varying.Family({padded: Direct(module, folder) for padded in (True, False)})  # type: ignore[arg-type]
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
        key = tracing.trace_key(trial, GPU)
        if key not in TRACED:
            TRACED[key] = tracing.trace_trial(trial, GPU, self.folder, self.module)
        return *TRACED[key], "traced"


def followed(trial: trials.Trial, folder: Path, batches: Sequence[lengths.Batch], conf: str = "") -> varying.Run:
    return varying.replay(*sequence(trial, folder, *([one] for one in batches)), allocator_config.parse(conf), None)


def shapes(trial: trials.Trial, steps: int) -> list[lengths.Batch]:
    return [batch for step in lengths.batches(trial, steps) for batch in step]


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize("runner", ["torch", "trainer"])
def test_steps_of_several_lengths_are_those_of_a_trace_of_these_lengths(
    runner: str, conf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three steps traced as they are, against three traces of one length each."""
    documents(monkeypatch, 20, 7, 9, 32, 3, 5)
    trial = tried(runner={"name": runner}, device=SIMULATED)
    traced, _ = tracing.trace_trial(trial, GPU, tmp_path, RUNNERS[runner])
    truth = replay(traced, allocator_config.parse(conf), None)
    monkeypatch.undo()
    found = followed(
        trial, tmp_path, [lengths.Batch(2, 20, 27), lengths.Batch(2, 32, 41), lengths.Batch(2, 5, 8)], conf
    )
    ours = [((mark.step, mark.phase), peaks) for mark, peaks in found.predicted.phases]
    assert ours == [((mark.step, mark.phase), peaks) for mark, peaks in truth.phases]
    assert found.predicted.peak == truth.peak
    assert found.predicted.final == truth.final
    assert found.predicted.breakdown == truth.breakdown


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["torch", "trainer"])
def test_accumulated_passes_have_each_their_own_length(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are aligned and some are not, whose kernels differ; the second step is the other way round."""
    documents(monkeypatch, 20, 7, 9, 32, 24, 2, 3, 5, 31, 30, 8, 1)
    trial = tried(runner={"name": runner}, device=SIMULATED, grad_accum=2)
    truth = replay(tracing.trace_trial(trial, GPU, tmp_path, RUNNERS[runner])[0], AllocatorConfig(), None)
    steps = [varying.passes(trial)[step] for step in range(3)]
    assert [[one.width for one in step] for step in steps] == [[20, 32], [24, 5], [31, 8]]
    monkeypatch.undo()
    found = varying.replay(*sequence(trial, tmp_path, *steps), AllocatorConfig(), None)
    assert [p for _, p in found.predicted.phases] == [p for _, p in truth.phases]
    assert found.predicted.final == truth.final and found.predicted.breakdown == truth.breakdown


@pytest.mark.slow
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_ranks_of_distributed_data_parallel_exchange_what_each_length_leaves(
    grad_accum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buckets are made anew in the second step, also where a pass before leaves gradients alone."""
    documents(monkeypatch, *range(31, 0, -1))
    trial = tried(device=SIMULATED, sharding="ddp", world_size=2, grad_accum=grad_accum)
    truth = replay(tracing.trace_trial(trial, GPU, tmp_path, torch_loop)[0], AllocatorConfig(), None)
    steps = varying.passes(trial)[:3]
    monkeypatch.undo()
    found = varying.replay(*sequence(trial, tmp_path, *steps), AllocatorConfig(), None)
    assert [p for _, p in found.predicted.phases] == [p for _, p in truth.phases]
    assert found.predicted.final == truth.final and found.predicted.breakdown == truth.breakdown


@pytest.mark.slow
def test_a_single_token_takes_memory_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents(monkeypatch, 9, 1, 32)
    trial = tried(device=SIMULATED, micro_batch=1)
    truth = replay(tracing.trace_trial(trial, GPU, tmp_path, torch_loop)[0], AllocatorConfig(), None)
    monkeypatch.undo()
    batches = [lengths.Batch(1, width, width) for width in (9, 1, 32)]
    found = followed(trial, tmp_path, batches)
    assert [p for _, p in found.predicted.phases] == [p for _, p in truth.phases]
    assert found.predicted.final == truth.final and found.predicted.breakdown == truth.breakdown
    with pytest.raises(trials.InvalidTrial, match=r"steps of 1 x 1 tokens leave .* \(try padding_to=8\)"):
        followed(tried(device=SIMULATED, micro_batch=1, runner={"name": "trainer"}), tmp_path, batches)


@pytest.mark.slow
def test_buckets_that_are_made_anew_once_are_held_once(tmp_path: Path) -> None:
    trial = tried(device=SIMULATED, sharding="ddp", world_size=2)
    long = followed(trial, tmp_path, [lengths.Batch(2, 24, 30)] * 6)
    one = varying.standin(trial, True, Point(24, 2))
    truth = replay(tracing.trace_trial(one, GPU, tmp_path, torch_loop)[0], AllocatorConfig(), None)
    assert long.predicted.peak == truth.peak
    assert len({end[0] for end in long.ends[1:]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_equal_lengths_need_what_one_length_needs(padded: bool, tmp_path: Path) -> None:
    batch = lengths.Batch(2, 24, 30 if padded else 48)
    trial = tried(device=SIMULATED)
    long = followed(trial, tmp_path, [batch] * 7)
    one = varying.standin(trial, padded, Point(24, 2))
    truth = replay(tracing.trace_trial(one, GPU, tmp_path, torch_loop)[0], AllocatorConfig(), None)
    assert long.predicted.peak == truth.peak
    assert long.predicted.breakdown == truth.breakdown
    assert len(set(long.ends)) == 1
    of_step = [[peaks for mark, peaks in long.predicted.phases if mark.step == step] for step in range(7)]
    assert of_step[2:] == [of_step[-1]] * 5


@pytest.mark.slow
def test_each_step_peaks_as_its_length_alone_does(tmp_path: Path) -> None:
    """What is allocated does not hang on what the allocator keeps, but for blocks whose rest is too small to split."""
    batches = [lengths.Batch(2, width, width + 1) for width in (20, 32, 5, 32, 20, 5)]
    trial = tried(device=SIMULATED)
    long = followed(trial, tmp_path, batches)
    for number, batch in enumerate(batches[2:], 2):
        alone = followed(trial, tmp_path, [batch] * 3)
        peaks = [
            [p["requested"] for m, p in run.predicted.phases if m.step == at]
            for run, at in ((long, number), (alone, 2))
        ]
        before = 3 * 8 * (batches[number - 1].tokens - batch.tokens)  # ids, labels and mask of the step before
        assert peaks[0][1:] == peaks[1][1:] and abs(peaks[0][0] - peaks[1][0]) <= abs(before)


@pytest.mark.slow
def test_expandable_segments_hold_less_where_lengths_grow(tmp_path: Path) -> None:
    """Each longer step finds no block large enough among those of the steps before; pages can be mapped anew."""
    trial = tried(device=SIMULATED, micro_batch=64)
    batches = [lengths.Batch(64, width, 64 * width - 1) for width in (40, 150, 310, 500)]
    default, expandable = (followed(trial, tmp_path, batches, conf) for conf in ("", "expandable_segments:True"))
    assert expandable.predicted.peak["allocated"] <= default.predicted.peak["allocated"]
    assert expandable.ends[-1][1] < 0.9 * default.ends[-1][1]
    reserved = [end[1] for end in default.ends]
    assert reserved == sorted(reserved)  # nothing is given back


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_named(tmp_path: Path) -> None:
    trial = tried(device=SIMULATED, micro_batch=64)
    batches = [lengths.Batch(64, width, 64 * width - 1) for width in (40, 150, 500, 150)]
    run = varying.replay(*sequence(trial, tmp_path, *([one] for one in batches)), AllocatorConfig(), 600 << 20)
    refused = run.predicted.refused
    assert refused is not None and run.asked is not None
    assert refused.mark.step == run.asked.step == 2 and len(run.ends) == 2
    assert sum(refused.parts.values()) == refused.allocated + refused.request
    assert run.predicted.phases[-1][0].phase == refused.mark.phase


def directly(trial: trials.Trial, folder: Path) -> varying.Family:
    """Every batch of the trial from a direct trace of its own length."""
    module = RUNNERS[trial.runner.name]
    return varying.Family({padded: Direct(module, folder) for padded in (True, False)})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_row_has_the_probe_step_and_every_measured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the replay's own phases, step by step; each length differs, so that no step stands for another."""
    monkeypatch.setattr(varying.allocator_config, "without_effect", lambda config: [])
    documents(monkeypatch, 289, 64, 640, 224, 384, 160, 1024, 96, 512, 256, 768, 768)
    trial = tried(device=SIMULATED, seq_len=1024, protocol={"name": "p", "warmup_steps": 1, "measured_steps": 4})
    batches = shapes(trial, 6)
    assert [(one.width, one.padded) for one in batches] == [
        (289, True), (640, True), (384, True), (1024, True), (512, True), (768, False)
    ]  # fmt: skip
    row = varying.predict(trial, directly(trial, tmp_path)).columns
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
    widest = tracing.trace_trial(varying.standin(trial, True, Point(1024, 2)), GPU, tmp_path, torch_loop)
    assert row["attention_kernels"] == sorted({*widest[1]["attention_kernels"], *kernels(trial, tmp_path, batches)})
    assert row["attention_kernels"] and varying.UNTIMED in row["notes"]


def kernels(trial: trials.Trial, folder: Path, batches: Sequence[lengths.Batch]) -> set[str]:
    """Attention's kernels of these batches."""
    family = directly(trial, folder)
    return {kernel for one in batches for kernel in family.details(trial, [one])[1]["attention_kernels"]}


@pytest.mark.slow
def test_details_are_of_the_widest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tried(device=SIMULATED, protocol={"name": "p", "warmup_steps": 1, "measured_steps": 4})
    documents(monkeypatch, 9, 2, 20, 7, 12, 5, 32, 3, 16, 8, 24, 24)
    asked: list[int] = []
    details = varying.Family.details

    def watched(self: varying.Family, trial: trials.Trial, passes: Sequence[lengths.Batch]) -> Any:
        asked.append(max(one.width for one in passes))
        return details(self, trial, passes)

    monkeypatch.setattr(varying.Family, "details", watched)
    varying.predict(trial, directly(trial, tmp_path))
    assert asked[0] == 32


@pytest.mark.slow
def test_the_reason_names_the_batch_and_a_card_that_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents(monkeypatch, 9, 2, 20, 7, 12, 5, 32, 3, 16, 8, 24, 24)
    trial = tried(device=SIMULATED, protocol={"name": "p", "warmup_steps": 1, "measured_steps": 4})
    batches = shapes(trial, 6)
    free = followed(trial, tmp_path, batches).predicted
    before = max(peaks["allocated"] for mark, peaks in free.phases if mark.step is not None and mark.step < 3)
    assert before < free.peak["allocated"]  # of step 3
    limits = {"a100-80gb": before + 1024}
    monkeypatch.setattr(varying, "memory_limit", lambda gpu: limits.get(gpu.name, free.peak["reserved"] - 1))
    monkeypatch.setattr(varying.simulated, "refused_text", lambda *_: "full")
    predicted = varying.predict(trial, directly(trial, tmp_path))
    assert predicted.error is not None
    at = predicted.phases[-1][0].step
    assert at is not None and at <= 3
    assert f"that step's batch is 2 x {batches[at].width} tokens" in str(predicted.error)
    assert predicted.columns["unlimited_peak_reserved_bytes"] == free.peak["reserved"]


def test_a_smaller_card_is_named_where_the_run_fits_it() -> None:
    card = gpus.named("t4-16gb")
    fitting = varying._smaller(card, 60 << 30, lambda gpu: gpus.memory_limit(gpu) > 20 << 30)
    assert fitting is not None and 20 << 30 < gpus.memory_limit(fitting) < 24 << 30 and fitting.capability >= (8, 0)
    assert varying._smaller(card, 60 << 30, lambda gpu: False) is None
    assert varying._smaller(card, 1 << 30, lambda gpu: True) is None  # what it needs without a limit is less


@pytest.mark.slow
def test_rows_of_a_sweep(run_sweep: Run) -> None:
    """Many lengths, from symbolic traces; two settings share them. One that does not fit says at which step."""
    over = {"data": DATA, "device": SIMULATED, "seq_len": 48, "protocol": {"measured_steps": 30}}
    rows = run_sweep(tiny(**over), tiny(**over, allocator={"name": "expandable", "conf": "expandable_segments:True"}))
    trial = trials.parse(tiny(**over))
    measured = lengths.batches(trial, 32)[2:]
    for row in rows:
        assert row["outcome"] == "ok" and row["isolation"] == "shared"
        assert row["step_tokens"] == [batch.tokens for (batch,) in measured]
        assert "symbolic" in row["trace_basis"]
        assert len(row["step_reserved_bytes"]) == 30 and row["tokens_per_s"] is None
        assert row["padding_fraction"] == lengths.seen(trial)["padding_fraction"]
    assert rows[0]["step_peak_allocated_bytes"] == rows[1]["step_peak_allocated_bytes"]
