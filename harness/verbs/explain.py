"""`vramsweep explain`: the parts of a predicted run's memory, and why the run does not fit.

runners/predict/explanation.py finds the parts; timeline.py shows every event of a step.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.files.sweep_folder import kept_traces
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.messages.console import Console, make_table
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import choose_unit, format_estimate, format_in, format_size
from vramsweep.harness.questions import trace_query
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.verbs.cli import read_parser

AMPERE = (8, 0)
MOST_GPUS = 6  # named in a line
STATES = ("parameters", "buffers", "gradients", "optimizer_state")
# Of the parts from weights and optimizer state to the GPU
TEXTS: dict[str, str] = json.loads(Path(__file__).with_name("explain.json").read_text("utf-8"))
TIMES: dict[str, str] = json.loads(Path(__file__).with_name("explain_time.json").read_text("utf-8"))  # kinds of kernels
_USAGE = "vramsweep explain model=NAME seq_len=N ... | vramsweep explain results/SWEEP [TRIAL_ID ...]"


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep explain`; return the exit status. Raises UserError for a mistake that the user can fix."""
    arguments, words = read_parser("explain").parse_known_args(argv)
    if not words:
        raise UserError(f"explain needs settings or a sweep's folder: {_USAGE}")
    if trace_query.name_a_trial(words):
        if (found := trace_query.find_trial("explain", words)) is None:
            return 0
        asked, traces = [found], None
    else:
        traces = kept_traces(Path(words[0]))
        rows = trace_query.finished(Path(words[0]), words[1:])
        asked = [(str(row["trial_id"]), trace_query.read_trial("explain", row)) for row in rows]
        if not asked:
            raise UserError(f"{words[0]} has no predicted row; give a trial's settings: {_USAGE}")
    console = Console(markup=True)
    records = []
    for trial_id, trial in asked:
        answer = trace_query.of_trial("explanation", "explain", trial_id, trial, traces)
        if answer is None:
            raise UserError(f"{fit_text.describe_trial(trial)} allocates nothing, so there is nothing to explain")
        if arguments.json:
            records.append(record(trial_id, trial, answer))
        else:
            (show_time if arguments.time else show)(trial, answer, console)
        if traces is None and answer["refused"] is not None and not arguments.json:
            command = shlex.join(["vramsweep", "advise", *words]).replace(" device.gpu=", " gpu=")
            console.print(f"next:\n  {escape(command)}  # what makes it fit", soft_wrap=True)
    if arguments.json:
        print(json.dumps(records))
    return 0


def record(trial_id: str, trial: Trial, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `--json` prints of a trial; sizes are in bytes."""
    return {
        "trial_id": trial_id,
        "about": trace_query.describe_trial(trial),
        "memory_limit_bytes": trial.memory_limit(),
        "from_states_to_card": dict(to_card(answer)),
        "explanation": answer,
    }


def to_card(answer: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the sizes in bytes that lead from the states, which an estimate from weights includes, to device used.

    `unknown` is the difference between the two.
    """
    peak, most = answer["peak"], answer["most"]
    states = sum(most[name] for name in STATES)
    yield "states", states
    yield "states_not_there_at_the_peak", sum(peak["parts"][name] for name in STATES) - states
    yield from ((name, size) for name, size in peak["parts"].items() if name not in STATES)
    yield "peak_allocated", peak["allocated"]
    yield "reserved_beyond_allocated", answer["peak_reserved"] - peak["allocated"]
    yield "peak_reserved", answer["peak_reserved"]
    yield "context", CONTEXT_BYTES
    yield "device", answer["peak_reserved"] + CONTEXT_BYTES
    yield "unknown", answer["peak_reserved"] + CONTEXT_BYTES - states


def show(trial: Trial, answer: Mapping[str, Any], console: Console) -> None:
    """Print an explanation as tables and text."""
    limit, refused = trial.memory_limit(), answer["refused"]
    most = fit_text.bound_reserved(answer["peak_reserved"], answer["peak_reserved_most"])
    unit = choose_unit(most)
    console.print(f"\n[bold]{escape(fit_text.describe_run(trial))}[/], predicted")
    if answer["host_refused"] is not None:
        console.print(f"[red]does not fit[/] in host memory: {escape(answer['host_refused'])}. On the GPU:")
    if refused is None:
        console.print(fit_text.describe_fit(answer["peak_reserved"], most, limit))
    else:
        held = answer["asked"]
        maker = filter(None, (held["category"].replace("_", " "), escape(held["module"]), held["operator"]))
        console.print(
            f"[red]{fit_text.describe_misfit(answer['peak_reserved'], limit)}[/]\n"
            f"memory runs out {_locate(held)}: a request of {format_size(refused['request'])} fails "
            f"({', '.join(maker)}), with {format_size(refused['allocated'])} allocated and "
            f"{format_size(refused['reserved'])} reserved. The tables show the run as if there were no limit."
        )
    for line in (*list_gpus(trial, most), *(f"not included: {text}" for text in fit_text.list_exclusions(trial))):
        console.print(escape(line))
    console.print(_phases(answer, unit))
    peak = answer["peak"]
    last = max((one["step"] for one in answer["phases"] if one["step"] is not None), default=None)
    if peak["step"] is not None and peak["step"] != last:
        console.print(f"The run's peak, {format_size(peak['allocated'])}, is earlier, {_locate(peak)}.")
    console.print(_holders(answer, unit))
    console.print(_steps_to_card(trial, answer, unit))


def show_time(trial: Trial, answer: Mapping[str, Any], console: Console) -> None:
    """Print the estimated time of the last traced step: of the GPU by kind of kernel, and of the host."""
    found = answer["speed"]
    console.print(f"\n[bold]{escape(fit_text.describe_run(trial))}[/], predicted")
    if found.get("calibrated_step_s") is None:
        console.print(escape(answer["untimed"] or "no estimated times, because the step launches no kernel"))
        return
    if answer["refused"] is not None or answer["host_refused"] is not None:
        console.print("[red]does not fit[/]; the times are those of a run that did")
    kernels = dict(found["estimated_kernels_s"])
    collectives, host = kernels.pop("collectives"), kernels.pop("host")
    whole = sum(kernels.values())
    step, low, high = (format_estimate(1e3 * found[f"calibrated_step_{name}s"]) for name in ("", "low_", "high_"))
    limit = "the host limits" if host > max(whole, collectives) else "the GPU limits"
    limit = "collectives limit" if collectives > max(whole, host) else limit
    console.print(f"a step takes about {step} ms ({low} to {high}); {limit} it")
    table = make_table(("", "ms", "share"), title="Estimated time of a step by kind of kernel", numbers=("ms", "share"))
    for name, seconds in sorted(kernels.items(), key=lambda one: -one[1]):
        table.add_row(TIMES[name], f"{1e3 * seconds:,.2f}", f"{seconds / whole:.0%}")
    table.add_row("= all kernels, one after the other", f"{1e3 * whole:,.2f}", "", style="bold")
    table.add_section()
    for name, seconds in ((f"host, for {found['estimated_launches']:,} launches", host), ("collectives", collectives)):
        if seconds:
            table.add_row(f"at the same time: {name}", f"{1e3 * seconds:,.2f}", "")
    console.print(table)
    if (padding := fit_text.describe_padding(trial, found)) is not None:
        console.print(escape(padding), soft_wrap=True)
    console.print(f"[dim]speeds: {escape(found['calibration'])}[/]", soft_wrap=True)


def list_gpus(trial: Trial, need: int) -> Iterator[str]:
    """Yield lines on the listed GPUs that the run would fit: of its own generation, whose step is equal, and others."""
    own, share = trial.device.card, allocator_config.parse(trial.allocator.conf).per_process_memory_fraction
    least = min(own.capability, AMPERE)  # because it is unknown what the run needs of its generation
    enough = gpu_lookup.gpus_with_enough(math.ceil(need / share), own.headroom_gib, least)
    each = f" ({trial.world_size} of each)" if trial.world_size > 1 else ""
    alike = [gpu.name for gpu in enough if gpu.capability == own.capability]
    others = [gpu.name for gpu in enough if gpu.capability != own.capability]
    if not enough:
        yield f"would fit on none of the listed GPUs{each}"
    if alike:
        yield f"would fit on{each}: {_shorten(alike)}"
    if others:
        yield f"probably also on: {_shorten(others)} (other generations, which need a little more or less)"


def _shorten(names: Sequence[str]) -> str:
    """Return the first names, which have the least memory, and how many more there are."""
    more = f" and {len(names) - MOST_GPUS} with more memory" if len(names) > MOST_GPUS else ""
    return ", ".join(names[:MOST_GPUS]) + more


def _phases(answer: Mapping[str, Any], unit: str) -> Table:
    show_size = partial(format_in, unit)
    phases, refused, most = answer["phases"], answer["refused"], answer["most"]
    names = ["loading" if one["step"] is None else one["phase"] for one in phases]
    last = ["peak of part", *([] if refused is None else ["when memory ran out"])]
    table = make_table(("", *names, *last), title=f"Peak of each phase, by part, in {unit}", numbers=(*names, *last))
    for name in filter(most.get, most):
        held = [one["parts"][name] for one in (*phases, {"parts": most}, *([] if refused is None else [refused]))]
        table.add_row(name.replace("_", " "), *(show_size(size) if size else "–" for size in held))
    table.add_section()
    blank = [] if refused is None else [""]
    whole = [] if refused is None else [show_size(refused["allocated"] + refused["request"])]
    table.add_row("= allocated", *(show_size(one["allocated"]) for one in phases), "", *whole, style="bold")
    table.add_row("reserved", *(show_size(one["reserved"]) for one in phases), "", *blank)
    return table


def _holders(answer: Mapping[str, Any], unit: str) -> Table:
    peak = answer["peak"]
    title = f"The largest tensors at the peak, {_locate(peak)}; equal layers are merged"
    numbers = (unit, "share", "tensors")
    table = make_table((*numbers, "part", "requested by"), title=title, numbers=numbers)
    for one in answer["largest"]:
        held, count = one["held"], one["count"]
        size = held["bytes"] * count
        each = f"{count} x {format_size(held['bytes'])}" if count > 1 else ""
        loaded, own = held["step"] is None, (held["step"], held["phase"]) == (peak["step"], peak["phase"])
        phase = "" if own else "loading" if loaded else held["phase"]
        made = phase if loaded or not held["line"] else escape(held["line"])  # a line says more than "forward"
        maker = f"{escape(held['module'])} {escape(held['operator'])}".strip() + (made and f"  [dim]{made}[/]")
        share, part = f"{size / peak['allocated']:.0%}", held["category"].replace("_", " ")
        table.add_row(format_in(unit, size), share, each, part, maker)
    if answer["rest_count"]:
        share, count = f"{answer['rest'] / peak['allocated']:.0%}", f"{answer['rest_count']:,}"
        table.add_row(format_in(unit, answer["rest"]), share, count, "others", "", style="dim")
    return table


def _steps_to_card(trial: Trial, answer: Mapping[str, Any], unit: str) -> Table:
    missing = [text.partition(";")[0] for text in fit_text.list_exclusions(trial)]
    table = make_table(("", unit), title="From weights and optimizer state to the GPU", numbers=(unit,))
    without = f"; without {', '.join(missing)}" if missing else ""
    for name, size in to_card(answer):
        if size:
            bold = "bold" if name in ("states", "peak_allocated", "peak_reserved", "device") else None
            table.add_row(TEXTS.get(name, name.replace("_", " ")).format(without), format_in(unit, size), style=bold)
    return table


def _locate(one: Mapping[str, Any]) -> str:
    return "while loading" if one["step"] is None else f"in the {one['phase']} phase of step {one['step']}"
