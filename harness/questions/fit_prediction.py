"""Predictions of whether the largest trial of each configuration fits the GPU, before any is run.

Predictions are made as any other (run_trials.py), in a folder that is deleted afterwards.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.console import Activity
from vramsweep.harness.process.signals import Deadline
from vramsweep.harness.rows.journal import read, terminal
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import fit_text, runner_table, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.sweep import run_trials
from vramsweep.harness.sweep.labels import Labels
from vramsweep.harness.sweep.plan import Planned, Settings

PREDICTIONS = 8  # configurations whose largest trial is predicted, the largest first
PREDICTION_S = 180.0  # for all of them together; a trace takes 1 to 30 s
CARD = "h100-80gb"  # the GPU to predict for if the machine has none, as device=simulated does


@dataclass(frozen=True)
class Prediction:
    """Upper bound of what a configuration's largest trial is predicted to reserve on `card`, in bytes. `least_bytes` is
    the lower bound, if it fits: the CPU does not run ahead of the GPU.

    `fits` is None if it could not be predicted, and `reason` says why.
    """

    trial_id: str
    label: str
    card: str
    needed_bytes: int | None = None
    card_bytes: int | None = None
    fits: bool | None = None
    reason: str | None = None
    estimated_step_s: float | None = None
    least_bytes: int | None = None


def largest_trials(todo: Sequence[Planned]) -> list[Planned]:
    """Return the trial with most tokens of each configuration on a GPU, the largest first.

    A configuration is all but length, batch, seed and repeat. Size is by parameters, then by tokens of a micro-batch.
    """

    def size(p: Planned) -> tuple[int, int, int]:
        assert p.trial is not None
        return p.trial.model.parameters or 0, p.trial.seq_len * p.trial.micro_batch, p.trial.seq_len

    found: dict[str, Planned] = {}
    for p in todo:
        if p.trial is None or p.trial.device.name != "cuda" or runner_table.runner(p.trial.runner.name).starts:
            continue
        axes = p.trial.model_dump(mode="json", exclude={"seq_len", "micro_batch", "seed", "repeat"})
        key = json.dumps(axes, sort_keys=True)
        if key not in found or size(p) > size(found[key]):
            found[key] = p
    return sorted(found.values(), key=size, reverse=True)


def predict_fit(largest: Sequence[Planned], settings: Settings, among: Sequence[Planned]) -> list[Prediction]:
    """Predict the first `PREDICTIONS` of the trials for this machine's GPU.

    Each is named by what tells it apart `among` the sweep's trials, including length and batch if they vary.
    """
    if not largest:
        return []
    named = Labels(among, but=("seed", "repeat"))
    labels = {p.trial_id: named(p) for p in largest}
    on, problem = choose_card(settings)
    if on is None:
        return [Prediction(p.trial_id, labels[p.trial_id], "this GPU", reason=problem) for p in largest[:1]]
    trials_here = f"{min(len(largest), PREDICTIONS)} trial(s)"
    print(f"predicting memory of {trials_here}, for {on.name}; predict=false skips this", file=sys.stderr)
    asked = [predictable(p, on) for p in largest[:PREDICTIONS]]
    with Activity("predicting"):
        rows = predicted_rows([p for p in asked if p.trial is not None], settings)
    return [_judge(p, labels[p.trial_id], on.name, rows.get(p.trial_id)) for p in asked]


def predicted_rows(asked: Sequence[Planned], settings: Settings) -> dict[str, Row]:
    """Predict trials silently in a folder that is deleted afterwards, within `PREDICTION_S` in all. Return their rows
    by id, as many as there was time for. Raises KeyboardInterrupt and UserError."""
    alone = replace(
        settings, report=False, shard=None, skip_dominated=False, budget=None, max_cost=None, others=False,
        timeout_s=PREDICTION_S / 2, retries=0, breaker=0, answer=None,
    )  # fmt: skip
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="vramsweep-plan-") as root:
        folder = Path(root) / "plan"
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                return run_trials.run(asked, alone, folder, interrupts=Deadline(PREDICTION_S))[0]
        except run_trials.Interrupted as stop:
            if stop.at_once:
                raise KeyboardInterrupt from None
            return terminal(read(folder)[0])


def simulate(trial: trials.Trial, card: gpu_lookup.Gpu) -> trials.Trial:
    """Return the trial that predicts another one for a GPU. Raises InvalidTrial if that cannot be predicted."""
    over = {"device": {"name": "simulated", "gpu": card.name}, "record": False, "weights": "random"}
    return trial_parser.parse(trial.model_dump(mode="json") | over)


def predictable(item: Planned, card: gpu_lookup.Gpu) -> Planned:
    """Turn a trial into its prediction for a GPU, under the same id; into a reason if it cannot be predicted."""
    assert item.trial is not None
    try:
        trial = simulate(item.trial, card)
    except trials.InvalidTrial as error:
        return replace(item, trial=None, reason=str(error))
    return Planned(item.trial_id, trial.model_dump(mode="json"), trial, None)


def _judge(item: Planned, label: str, card: str, row: Row | None) -> Prediction:
    """Return what a predicted row says of a trial; `row` is None if there was no time for it."""
    if item.trial is None:
        return Prediction(item.trial_id, label, card, reason=item.reason)
    kind = Outcome.TIMEOUT if row is None else row["outcome"]
    if row is None or kind not in (Outcome.OK, Outcome.OOM):
        slow = f"{PREDICTION_S:g} s were not enough for all predictions"
        reason = slow if row is None or kind == Outcome.TIMEOUT else f"{kind}: {row['reason']}"
        return Prediction(item.trial_id, label, card, reason=reason)
    limit, step_s = item.trial.memory_limit(), row["calibrated_step_s"] or row["estimated_step_s"]
    low, need = row["peak_reserved_bytes"], find_need(row)
    return Prediction(item.trial_id, label, card, need, limit, kind == Outcome.OK, row["reason"], step_s, low)


def find_need(row: Row) -> int | None:
    """Return the most that a predicted run reserves, in bytes, if need be without a limit; None: not known."""
    if row["outcome"] in (Outcome.OOM, Outcome.HOST_OOM):
        return row.get("unlimited_peak_reserved_bytes")
    low = row.get("peak_reserved_bytes") if row["outcome"] == Outcome.OK else None
    return None if low is None else fit_text.bound_reserved(low, row.get("peak_reserved_most_bytes"))


def choose_card(settings: Settings) -> tuple[gpu_lookup.Gpu | None, str]:
    """Return the GPU to predict for: the named one, this machine's, or `CARD`; None and why if our table lacks it."""
    if isinstance(settings.predict, str):
        return gpu_lookup.gpu_named(settings.predict), ""
    if not (cards := machine.visible_gpus(os.environ)):
        return gpu_lookup.gpu_named(CARD), ""
    name = cards[0].name
    known = gpu_lookup.find_gpu(name) if name else None
    return known, f"{name or 'this GPU'} is not in the table of GPUs; predict=GPU predicts for a GPU of the table"
