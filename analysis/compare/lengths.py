"""Runs with varying lengths (data=lengths:...): what their steps had, and what each allocator setting holds at the end.

In: groups of rows. Out: sentences and a table. All sizes are in bytes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vramsweep.analysis.data.groups import Group, label, others_equal
from vramsweep.harness.messages.units import format_gib, format_size

NEEDED = ("seq_len", "seed", "allocator")
STEPS = ("step_reserved_bytes", "step_peak_allocated_bytes", "step_tokens")
DOCUMENTS = ("shortest_document", "mean_document", "longest_document")
COLUMNS = (
    *NEEDED, *STEPS, *DOCUMENTS, "allocator_conf", "outcome", "phase", "warmup_steps", "padding_fraction",
    "peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "tokens_per_s", "memory_source", "trial_id",
)  # fmt: skip
SAME = 0.005  # a smaller relative difference of reserved counts as none
_APART = ("allocator", "allocator_conf", "seed")  # settings that may differ between runs of one comparison
_STEP = re.compile(r"step (\d+)(?:: (.*))?")


@dataclass(frozen=True)
class Held:
    """One run: reserved at the end of each measured step, the most allocated in each.

    `waste` is the share of peak reserved above the peak allocated; `retries` is None if not known.
    """

    allocator: str
    trial_id: str
    seed: int
    reserved: NDArray[np.float64] = field(repr=False)
    allocated: NDArray[np.float64] = field(repr=False)
    waste: float | None
    retries: int | None


@dataclass(frozen=True)
class Setting:
    """The runs of one allocator setting, by seed, and at which step those that ran out of memory did, in words."""

    name: str
    held: tuple[Held, ...]
    full: tuple[str, ...]

    def at(self, seed: int) -> Held | None:
        """Return its run on the lengths of a seed, None if there is none."""
        return next((one for one in self.held if one.seed == seed), None)


@dataclass(frozen=True)
class Runs:
    """Runs that differ in the allocator's setting and the seed alone, the default first. `seq_len` is the length at
    which samples were cut, the largest there is. `label` tells these runs from others; `rows` are all of them."""

    label: str
    seq_len: int
    settings: tuple[Setting, ...]
    rows: pd.DataFrame = field(repr=False)

    @property
    def where(self) -> str:
        """Name of the runs in a sentence: label, length at which samples were cut, seeds."""
        seeds = sorted({int(seed) for seed in self.rows["seed"].dropna()})
        of = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return " · ".join(filter(None, [self.label, f"samples of at most {self.seq_len:,} tokens", of]))

    def drawn(self) -> list[Held]:
        """Return one run of each setting, all of the seed that most settings have."""
        counts = pd.Series([held.seed for one in self.settings for held in one.held], dtype=int).value_counts()
        best = min(counts.index[counts == counts.max()], default=0)
        return [held for one in self.settings if (held := one.at(best)) is not None]


def runs(groups: Sequence[Group]) -> list[Runs]:
    """Return the runs to compare, one `Runs` for each setting of everything but allocator and seed. Each has the rows
    of its longest seq_len; the last of repeats counts."""
    left = [group for group in groups if group.varies]
    found = []
    while left:
        alike = others_equal(left, _APART)
        left = [group for group in left if group not in alike]
        rows = pd.concat([group.take(*COLUMNS) for group in alike])
        rows = rows[rows["outcome"].isin(["ok", "oom"])].dropna(subset=list(NEEDED))
        if rows.empty:
            continue
        rows = rows[rows["seq_len"] == rows["seq_len"].max()]
        told = {key: value for group in alike for key, value in group.settings.items()}
        rest = {key: value for key, value in told.items() if not key.removeprefix("trial.").startswith(_APART)}
        found.append(Runs(label(rest) if rest else "", int(rows["seq_len"].max()), _settings(rows), rows))
    return found


def _settings(rows: pd.DataFrame) -> tuple[Setting, ...]:
    warm = rows["warmup_steps"].max()
    several = rows.groupby("allocator")["allocator_conf"].nunique() > 1
    found = []
    texts = rows.assign(allocator_conf=rows["allocator_conf"].fillna(""))
    for keys, mine in texts.groupby(["allocator", "allocator_conf"], sort=False):
        allocator, conf = map(str, keys)
        name = f"{allocator} {conf}".rstrip() if several[allocator] else allocator
        known = mine[mine["outcome"].eq("ok")].dropna(subset=list(STEPS)).drop_duplicates("seed", keep="last")
        held = tuple(_read_held(name, row) for _, row in known.sort_values("seed").iterrows())
        full = mine[mine["outcome"].eq("oom")].drop_duplicates("seed", keep="last").sort_values("seed")
        found.append(Setting(name, held, tuple(_describe_moment(phase, warm) for phase in full["phase"].fillna(""))))
    return tuple(sorted(found, key=lambda one: (one.name != "default", not one.held)))


def _read_held(name: str, row: pd.Series) -> Held:
    allocated, reserved = row["peak_allocated_bytes"], row["peak_reserved_bytes"]
    return Held(
        name,
        str(row["trial_id"]),
        int(row["seed"]),
        np.array(row["step_reserved_bytes"], dtype=float),
        np.array(row["step_peak_allocated_bytes"], dtype=float),
        None if pd.isna(allocated) or pd.isna(reserved) or not reserved else 1 - float(allocated) / float(reserved),
        None if pd.isna(row["alloc_retries"]) else int(row["alloc_retries"]),
    )


def _describe_moment(phase: str, warm: float) -> str:
    """Say at which step memory ran out. A row counts all steps from 0; here measured ones count from 1, as in the
    figure. The steps of warm-up and probe come before them."""
    if (step := _STEP.fullmatch(phase)) is None or pd.isna(warm):
        return phase
    number = int(step[1]) - int(warm)
    before = "the probe step" if number == 0 else f"warm-up step {int(step[1]) + 1}"
    return (f"measured step {number:,}" if number > 0 else before) + (f" ({step[2]})" if step[2] else "")


def sentences(every: Sequence[Runs]) -> list[str]:
    """Return what each setting holds at the end, compared with the first; if none finished, what the steps had."""
    return [f"With varying lengths ({one.where}), {text}." for one in every for text in _of(one)]


def _of(found: Runs) -> Iterator[str]:
    holding = [one for one in found.settings if one.held]
    if not holding and (drawn := _steps(found.rows)):
        yield drawn
    if len(holding) == 1:
        yield _alone(holding[0])
    for other in holding[1:]:
        yield _against(holding[0], other)
    lasting = [one.name for one in found.settings if one.held and not one.full]
    for one in found.settings:
        if one.full:
            total = len(one.full) + len(one.held)
            often = "" if total == 1 else f" in {len(one.full)} of {total} runs"
            places = f" at {one.full[0]}" if one.full[0] else ""
            on = f"; {' and '.join(lasting)} do{'es' * (len(lasting) == 1)} not" if lasting else ""
            yield f"{one.name} runs out of memory{often}{',' * bool(often and places)}{places}{on}"


def _steps(rows: pd.DataFrame) -> str:
    """Describe the tokens, padding and documents of the steps."""
    if (done := rows[rows["outcome"].eq("ok")].dropna(subset=["step_tokens"])).empty:
        return ""
    tokens = np.concatenate([np.array(one, dtype=float) for one in done["step_tokens"]])
    text = f"a step has {_ends(tokens)} tokens, {tokens.mean():,.0f} on average"
    if done["padding_fraction"].notna().any():
        text += f", {100 * done['padding_fraction'].mean():.0f} % of it padding"
    if done["mean_document"].notna().any():
        ends = _ends(pd.concat([done["shortest_document"], done["longest_document"]]))
        text += f"; documents have {ends}, {done['mean_document'].mean():,.0f} on average"
    most = done["peak_allocated_bytes"].dropna()
    return text + (f"; peak allocated {_range(list(most), format_size)}" if len(most) else "")


def _ends(counts: NDArray[np.float64] | pd.Series) -> str:
    return _range([counts.min(), counts.max()], "{:,.0f}".format)


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys([show(min(values)), show(max(values))]))


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _alone(one: Setting) -> str:
    """Describe what the only setting holds, over its seeds."""
    ends = _range([held.reserved[-1] for held in one.held], format_size)
    grown = [held.reserved[-1] - held.reserved[0] for held in one.held]
    most = max(grown, key=abs)
    way = f"{format_size(abs(most))} {'more' if most > 0 else 'less'} than" if most else "as much as"
    up_to = "up to " if most and min(grown) != max(grown) else ""
    retries = [held.retries for held in one.held if held.retries]
    tries = f", with {sum(retries):,} retr{'y' if sum(retries) == 1 else 'ies'}" if retries else ""
    waste = [held.waste for held in one.held if held.waste is not None]
    idle = f"; {_range(waste, _share)} of its peak reserved was above its peak allocated" if waste else ""
    return f"{one.name} reserves {ends} after {_count(one)} steps, {up_to}{way} after the first of them{idle}{tries}"


def _count(one: Setting) -> str:
    return _range([len(held.reserved) for held in one.held], lambda steps: f"{steps:,}")


def _against(first: Setting, other: Setting) -> str:
    """Compare one setting with the first, over the seeds on which both have the same steps."""
    if not (pairs := [(mine, its) for its in other.held if (mine := first.at(its.seed)) is not None]):
        return f"{other.name} and {first.name} have no seed in common, so they are not compared"
    if not (pairs := [pair for pair in pairs if len(pair[0].reserved) == len(pair[1].reserved)]):
        counts = f"{_count(other)} and {_count(first)}"
        return f"{other.name} and {first.name} have {counts} measured steps, so they are not compared"
    pairs.sort(key=lambda pair: _change(*pair))
    ends = [pairs[0], pairs[-1]] if _in_words(_change(*pairs[0])) != _in_words(_change(*pairs[-1])) else pairs[:1]
    said = " to ".join(_in_words(_change(*pair)) for pair in ends)
    sizes = ", ".join(
        f"{format_size(its.reserved[-1])} against {format_size(mine.reserved[-1])}"
        + (f" with seed {its.seed}" if len(pairs) > 1 else "")
        for mine, its in ends
    )
    steps = _range([len(its.reserved) for _, its in pairs], lambda steps: f"{steps:,}")
    over = f" over {len(pairs)} seeds" if len(pairs) > 1 else ""
    text = f"compared with {first.name}, {other.name} reserves {'from ' * (len(ends) > 1)}{said}"
    text += f"{over} after {steps} steps ({sizes})"
    if waste := [(its.waste, mine.waste) for mine, its in pairs if its.waste is not None and mine.waste is not None]:
        its_, mine_ = ([pair[side] for pair in waste] for side in (0, 1))
        text += f"; {_range(its_, _share)} of its peak reserved was above its peak allocated,"
        text += f" against {_range(mine_, _share)} of {first.name}'s"
    tries = [(its.retries, mine.retries) for mine, its in pairs if its.retries is not None and mine.retries is not None]
    if any(map(any, tries)):
        text += f"; retries {sum(its for its, _ in tries):,} against {sum(mine for _, mine in tries):,}"
    return text


def _change(mine: Held, its: Held) -> float:
    return float(its.reserved[-1] / mine.reserved[-1] - 1)


def _in_words(change: float) -> str:
    return "as much" if abs(change) < SAME else f"{_share(abs(change))} {'less' if change < 0 else 'more'}"


def table(groups: Sequence[Group]) -> pd.DataFrame:
    """Return a line for the varying runs of each group and seq_len: what they had and what they took, as text."""
    lines = []
    for group in groups:
        rows = group.take(*COLUMNS)
        for seq_len in sorted(rows["seq_len"].dropna().unique()):
            mine = rows[rows["seq_len"] == seq_len]
            done = mine[mine["outcome"].eq("ok")]
            tokens = np.concatenate([[], *(np.array(one, dtype=float) for one in done["step_tokens"].dropna())])
            line = {"settings": group.label, "samples cut at (tokens)": f"{int(seq_len):,}", "ok": str(len(done))}
            line["oom"] = str(int(mine["outcome"].eq("oom").sum()))
            line["other"] = str(len(mine) - len(done) - int(line["oom"]))
            line["tokens of a step"] = _ends(tokens) if len(tokens) else "–"
            line["padding"] = _mean(done["padding_fraction"], _share)
            documents = [done["shortest_document"], done["longest_document"]]
            known = all(one.notna().any() for one in documents)
            line["documents (tokens)"] = _ends(pd.concat(documents)) if known else "–"
            line["mean document"] = _mean(done["mean_document"], "{:,.0f}".format)
            line["allocated (GiB)"] = _mean(done["peak_allocated_bytes"], format_gib)
            line["reserved (GiB)"] = _mean(done["peak_reserved_bytes"], format_gib)
            line["tokens/s, padding counted"] = _mean(done["tokens_per_s"], "{:,.0f}".format)
            lines.append(line)
    found = pd.DataFrame(lines)
    return found.loc[:, (found != "–").any()] if lines else found


def _mean(values: pd.Series, show: Callable[[float], str]) -> str:
    known = values.dropna()
    return show(float(known.mean())) if len(known) else "–"
