"""Flags: each is one test of a row that speaks against using its numbers as they are. Pure.

Most are for rows that measured something; no row is left out because of one. Each threshold is a constant with its
source; docs/how_measurement_works.md lists them next to the formulas. check.py decides what may be published with
flags.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from vramsweep.harness.allocator import config as allocator
from vramsweep.harness.rows import step_statistics
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec.runner_table import TARGETED

GIB = 1 << 30
# NVML's clock event reasons that no steady load causes by itself; the power cap is normal for a busy GPU.
HEAT_AND_FAULTS = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
CORRECTED = "corrected_since"  # only rows of earlier versions have it, and no test of their values sets it
BASELINE_BYTES = GIB  # more than the driver keeps for itself on any GPU here
CLOCK_SHARE = 0.75  # of the highest SM clock: nvbench's --throttle-threshold, below which it discards a sample
# Load average per core when the attempt began (proc_loadavg(5): tasks that run, or would). On a CPU, our own trial
# before leaves at most 1, because its threads take every core; so half a core of each is used by others. Next to a GPU,
# the thread that launches kernels has a core for itself up to 1.
BUSY = {"cpu": 1.5, "cuda": 1.0}
CLOCKS_APART = 0.01  # share of the time that `compare` tells apart (analysis/compare/verdicts.py, MARGIN)
WAKE_S = 0.05  # the host may learn this much later that the GPU has ended: some turns of a busy machine's scheduler
ROUNDING = 1e-6  # of a sum of floats
MEMORY, SPEED = "memory", "speed"
BOTH = (MEMORY, SPEED)


@dataclass(frozen=True)
class Flag:
    """A name, its meaning, and a test of a row, which is None if the row does not tell.

    `forbids` are the claims that a row with the flag cannot carry; if empty, the flag is only stated next to the
    numbers. `chance` is how often the test is true of a row in which nothing is wrong. `predicted`: predicted rows too.
    """

    name: str
    meaning: str
    test: Callable[[Row], bool | None]
    forbids: tuple[str, ...] = BOTH
    chance: float = 0.0
    predicted: bool = False


def _known(column: str, test: Callable[..., bool]) -> Callable[[Row], bool | None]:
    def found(row: Row) -> bool | None:
        value = row.get(column)
        return None if value is None else test(value)

    return found


def _of_steps(test: Callable[..., bool | None]) -> Callable[[Row], bool | None]:
    """Return a test of step times that applies only to steps of one length, because other lengths take other times."""

    def found(row: Row) -> bool | None:
        times, tokens = row.get("step_times_s"), row.get("step_tokens")
        return None if times is None or len(set(tokens or ())) > 1 else test(times)

    return found


def _still_rose(row: Row) -> bool | None:
    """Check whether an allocator's peak still rose; the resident set of a process on a CPU always creeps up."""
    reached = row.get("plateau")
    return None if reached is None or row.get("memory_source") == "cpu_tensors_and_rss" else not reached


def _low_clocks(row: Row) -> bool | None:
    """Check the lower of the clocks before and after the measured steps."""
    highest = row.get("gpu_sm_clock_max_mhz")
    seen = [mhz for when in ("before_mhz", "mhz") if (mhz := row.get(f"gpu_sm_clock_{when}")) is not None]
    return None if not highest or not seen else bool(min(seen) < CLOCK_SHARE * highest)


def _busy_host(row: Row) -> bool | None:
    load, limit = row.get("host_load"), BUSY.get(str(row.get("device")))
    return None if load is None or limit is None else bool(load > limit)


def _clock_anomaly(row: Row) -> bool | None:
    """Check for time that did not pass, steps that do not add up, and clocks of GPU and host that differ."""
    times, elapsed, by_host = row.get("step_times_s"), row.get("elapsed_s"), row.get("host_elapsed_s")
    if times is None or elapsed is None:
        return None
    apart = 0.0 if by_host is None else abs(by_host - elapsed)
    return (
        min(times, default=math.inf) <= 0
        or not math.isclose(sum(times), elapsed, rel_tol=ROUNDING)
        or apart > max(WAKE_S, CLOCKS_APART * elapsed)
    )


def _other_settings(row: Row) -> bool | None:
    """Check the settings that are read back: allocator, attention, its kernel, optimizer, number of ranks."""
    found = [test(row) for test in (_allocator, _attention, _kernel, _optimizer, _ranks)]
    known = [other for other in found if other is not None]
    return any(known) if known else None


def _allocator(row: Row) -> bool | None:
    """Check for options in force with another value than requested; options that torch does not report are ignored."""
    asked, effective = row.get("allocator_conf"), row.get("allocator_conf_effective")
    if asked is None or effective is None:
        return None
    try:
        wanted, force = allocator.parse(asked), allocator.parse(effective)
    except allocator.AllocatorConfigError:
        return bool(asked != effective)
    return bool(allocator.differences(wanted, force, [option.name for option in force.set_options()]))


def _attention(row: Row) -> bool | None:
    asked, effective = row.get("attention"), row.get("attention_effective")
    if asked is None or effective is None or row.get("runner") in TARGETED:  # a target may ignore it
        return None
    return bool(effective != ("sdpa" if asked.startswith("sdpa") else asked))


def _kernel(row: Row) -> bool | None:
    asked, ran = str(row.get("attention")), row.get("attention_kernels")
    if not asked.startswith("sdpa_") or not ran or row.get("runner") in TARGETED:
        return None
    return set(ran) != {asked.removeprefix("sdpa_")}


def _optimizer(row: Row) -> bool | None:
    """Check the optimizer's family and the bits of its state, which are what the class that ran shows."""
    asked, effective = row.get("optimizer"), row.get("optimizer_effective")
    own = row.get("runner") in TARGETED or (asked == "default" and row.get("ds_config"))  # these choose for themselves
    if asked is None or effective is None or own:
        return None
    ran = effective.lower().replace("-", "")
    family = next((name for name in ("adafactor", "sgd", "lion") if name in asked), "adam")
    wanted = {family, *(word for word in asked.split("_") if word.endswith("bit") or word == "paged")}
    return not all(word in ran for word in wanted)


def _ranks(row: Row) -> bool | None:
    asked, had = (row.get("trial") or {}).get("world_size"), row.get("world_size")
    return None if asked is None or had is None else bool(asked != had)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


# fmt: off
FLAGS = (
    Flag("contended", "other processes used the GPU before or after the steps", _known("foreign_processes", bool)),
    Flag("high_baseline", "more than 1 GiB of the GPU was in use before the trial started; in a container, "
         "other processes are not listed", _known("device_baseline_bytes", lambda used: used > BASELINE_BYTES)),
    Flag("throttled", "the clocks were lowered because of heat or by a hardware slowdown",
         _known("throttle_reasons", lambda reasons: bool(HEAT_AND_FAULTS & set(reasons))), (SPEED,)),
    Flag("low_clocks", f"the SM clock was below {_percent(CLOCK_SHARE)} of the GPU's highest before or after the "
         "steps, for example by a power cap; state it with the speed", _low_clocks, ()),
    Flag("busy_host", f"the host's load average was above {BUSY['cpu']:g} per core ({BUSY['cuda']:g} where a GPU is "
         "measured) at the start of the attempt", _busy_host, (SPEED,)),
    Flag("host_bound", "the host, not the GPU, limited the speed, which tells little of GPU and settings; state it "
         "with the speed", _known("bound_by", lambda by: by == "host"), ()),
    Flag("wide_spread", f"the standard deviation of step times is {_percent(step_statistics.DEVIATION)} of their mean "
         f"or more, or a step differs from the mean by {_percent(step_statistics.OUTLIER)} or more",
         _of_steps(step_statistics.is_noisy), (SPEED,)),
    Flag("not_settled", "the steps still got faster (warm-up was not over) or slower, by a rank test and by "
         f"{_percent(2 * step_statistics.MOVES)} or more", _of_steps(step_statistics.is_drifting), (SPEED,),
         step_statistics.FALSE_ALARM),
    Flag("odd_end", "the first or last step differs from the others and changes the mean by "
         f"{_percent(step_statistics.MOVES)} or more", _of_steps(step_statistics.outlying_end), (SPEED,),
         step_statistics.FALSE_ALARM),
    Flag("clock_anomaly", "a step took no time, the steps do not add up to the total, or the clocks of GPU and host "
         "disagree", _clock_anomaly, (SPEED,)),
    Flag("not_plateaued", "the peak reserved still rose in the second half of the steps", _still_rose, (MEMORY,)),
    Flag("leaks", "every step ended with more allocated than the one before",
         _known("step_growth_bytes", lambda n: n > 0), (MEMORY,), predicted=True),
    Flag("no_gradient", "some trained parameters had no gradient in any step, so they were not trained and needed less "
         "memory than if they were", _known("parameters_without_gradient", bool), predicted=True),
    Flag("allocation_retries", "the allocator had to release cached blocks to satisfy a request, which costs time",
         _known("alloc_retries", lambda count: count > 0)),
    Flag("steps_skipped", "updates were skipped because of an overflow (fp16)",
         _known("skipped_steps", lambda count: count > 0)),
    Flag("other_settings", "settings read back (allocator, attention, optimizer, ranks) differ from the trial's",
         _other_settings),
    Flag(CORRECTED, "measured by an earlier version whose numbers were corrected since (CHANGELOG); fitted "
         "separately from other rows", lambda row: None),
    Flag("not_alone", "other trials of this tool ran on the machine at the same time", _known("node_trials", bool),
         (SPEED,)),
)
# fmt: on
BY_NAME = {flag.name: flag for flag in FLAGS}


def flags(row: Row) -> list[str]:
    """Return the names of the flags that a row has, in the order of the table."""
    measured = row.get("device") != "simulated"
    return [flag.name for flag in FLAGS if (measured or flag.predicted) and flag.test(row)]


def markdown_table() -> str:
    """Return the flags as a table for the documentation."""
    lines = ["**flags** ([thresholds, sources and false alarms](docs/how_measurement_works.md#flags))", ""]
    lines += ["| flag | meaning | forbids claims about |", "|---|---|---|"]
    table = (f"| `{flag.name}` | {flag.meaning} | {' and '.join(flag.forbids)} |" for flag in FLAGS)
    return "\n".join([*lines, *table]) + "\n"
