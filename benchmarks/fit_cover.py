"""Measure coverage and width of the 95 % intervals of fits, on generated rows whose truth is known.

    python benchmarks/fit_cover.py [--draws 500] [--seed N] [--only WORD] [--part I N]

A cell is a truth, a noise and a set of lengths. Each draw makes a truth and rows of it, fits these rows, and predicts a
new run between two lengths and one at twice the longest. Columns:

- at both lengths: share of new runs inside the interval, and its width as a share of the truth (median)
- at twice the longest: interval score over the truth (Gneiting & Raftery 2007: width + 2 / 0.05 x miss), mean
- share of draws whose curve is identified, and the median error of these curves at twice the longest
- share of draws whose most probable kind is the truth's (imported rows only)

Our own rows have each phase's peak. Their truths are weights, gradients, states and activations drawn at random, or
replays of real traces (results/reference/replays.csv), which no formula of the fitter made. Imported rows ("foreign" in
the table) have the peak alone.

    python benchmarks/fit_cover.py --grids [--draws 8] [--seed N] [--only WORD] [--part I N]

With --grids, fits to a usual grid are tested at the lengths off it. A grid is 4 to 12 multiples of 64 or 128, with both
ends, and 0, 1 or 3 lengths that 8 does not divide. Sweeps are public or in results/reference/replayed_lengths.csv. A
draw tests a third of the other lengths. Columns: share of them whose run is inside the interval, also of multiples
of 8 and of the rest; half its width (median) and score (mean), in MiB; share of draws whose curve is identified.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group
from vramsweep.analysis.data.metrics import METRICS, MIB
from vramsweep.analysis.model.fit import Fit, fit_points
from vramsweep.analysis.model.observations import Points, observations
from vramsweep.analysis.model.predictors import Knows, Whole

Array = np.ndarray[Any, np.dtype[np.float64]]
Random = np.random.Generator
Noise = Callable[[Array, Random], Array]
PUBLIC = Path(__file__).parents[2] / "shared" / "data" / "qwen15-0.5b-zero3" / "without-expandable-segments.csv"
REPLAYS = Path(__file__).parents[1] / "results" / "reference" / "replays.csv"
REPLAYED_LENGTHS = REPLAYS.with_name("replayed_lengths.csv")
LENGTHS = {
    "6": (128, 256, 512, 1024, 1536, 2048),
    "7": (128, 256, 512, 768, 1024, 1536, 2048),
    "8 geometric": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "4": (256, 512, 1024, 2048),
    "3": (256, 768, 2048),
}
NOISES: dict[str, Noise] = {
    "none": lambda y, random: y,
    "512 B": lambda y, random: np.round((y + random.uniform(-256, 256, y.shape)) / 512) * 512,
    "2 MiB": lambda y, random: y + 2 * MIB * random.standard_normal(y.shape),
    "20 MiB blocks": lambda y, random: np.ceil(y / (20 * MIB)) * 20 * MIB,
    "0 to 3 %": lambda y, random: y * (1 + random.uniform(0, 0.03, y.shape)),
}
MEANS = {"0 to 3 %": 0.015}  # mean of the noise, as a share
PHASES = ("load", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Truth:
    """A true curve. `phases` maps samples and lengths in tokens, (n,), to bytes by phase, (4, n); for imported rows all
    four are the peak. `kind` is the fitter's name, if any; `batch` the rows'; `known` the lengths, if not all."""

    phases: Callable[[Array, Array], Array]
    kind: str | None = None
    batch: int = 1
    attention: str = "sdpa"
    capacity: float = np.inf
    known: Array | None = None

    def lengths(self, asked: Sequence[int]) -> list[int]:
        """Return `asked`, or the known lengths nearest to `asked` scaled to end at half of the longest known."""
        if self.known is None:
            return list(asked)
        scaled = np.array(asked) / max(asked) * self.known.max() / 2
        return sorted({int(self.nearest(s)) for s in scaled})

    def nearest(self, length: float) -> float:
        """Return the nearest known length."""
        return float(length if self.known is None else self.known[int(np.argmin(np.abs(self.known - length)))])


@dataclass(frozen=True)
class Drawn:
    """One draw's outcome."""

    inside: bool
    beyond: bool
    width: float
    width_beyond: float
    score: float
    identified: bool
    error: float
    right: bool


def made_up(random: Random) -> Truth:
    """Draw a model's weights, states and activations. Their proportions vary so that the knot may lie anywhere."""
    weights = random.uniform(0.3, 4) * 1024 * MIB
    states = weights * random.uniform(1.5, 3.2)
    slope = (weights + states) / np.exp(random.uniform(np.log(150), np.log(6000)))
    held, loss = slope * random.uniform(0.75, 0.97), random.uniform(0, 40) * MIB
    end = weights * random.uniform(1.6, 2.4) + states * random.uniform(0.3, 1.0)

    def phases(batch: Array, length: Array) -> Array:
        tokens = batch * length
        forward = weights + states + held * tokens
        backward = np.maximum(end + states * 0.2, weights + states + loss + slope * tokens)
        return np.array([np.full_like(tokens, weights), forward, backward, np.full_like(tokens, end + states * 0.3)])

    return Truth(phases)


def replayed(random: Random) -> Truth:
    """Draw one of the stored replays of a real trace on a GPU, and a batch of 1, 2 or 4."""
    table = _replays()
    names = sorted(table["configuration"].unique())
    mine = table[table["configuration"] == names[random.integers(len(names))]]
    columns = [f"{phase}_peak_allocated_bytes" for phase in PHASES]
    kept = {int(b): rows.set_index("seq_len")[columns] for b, rows in mine.groupby("micro_batch")}

    def phases(batch: Array, length: Array) -> Array:
        return np.array([kept[int(b)].loc[int(s)] for b, s in zip(batch, length, strict=True)], float).T

    batch, known = int(random.choice([1, 2, 4])), np.unique(mine["seq_len"]).astype(float)
    return Truth(phases, batch=batch, attention=_attention(mine), known=known)


def _attention(mine: pd.DataFrame) -> str:
    return "eager" if "eager" in str(mine["configuration"].iloc[0]) else "sdpa"


_KEPT: dict[str, pd.DataFrame] = {}


def _replays() -> pd.DataFrame:
    if "table" not in _KEPT:
        _KEPT["table"] = pd.read_csv(REPLAYS)
    return _KEPT["table"]


def _alone(curve: Callable[[Array], Array], kind: str) -> Truth:
    return Truth(lambda batch, length: np.array([curve(batch * length)] * 4), kind)


def line(random: Random) -> Truth:
    """Draw a straight line."""
    a, b = random.uniform(2, 20) * 1024 * MIB, random.uniform(0.3, 6) * MIB
    return _alone(lambda x: a + b * x, "linear")


def hinge(random: Random, low: float = 256, high: float = 1536) -> Truth:
    """Draw a flat piece, then a line; by default the knot has two lengths on each side."""
    a, b, k = random.uniform(4, 16) * 1024 * MIB, random.uniform(0.8, 6) * MIB, random.uniform(low * 1.02, high * 0.98)
    return _alone(lambda x: a + b * np.maximum(0, x - k), "hinge")


def out_of_memory(random: Random) -> Truth:
    """Draw a hinge and the capacity of a GPU that the two longest lengths do not fit."""
    found = hinge(random, 256, 1024)
    one = np.ones(2)
    needs = found.phases(one, np.array([1024.0, 1536.0]))[0]
    return replace(found, capacity=float(random.uniform(*needs)))


def published(random: Random) -> Truth:
    """Draw the shortest length to use of a public sweep, whose measurements are the truth."""
    table = pd.read_csv(PUBLIC, header=None, usecols=[0, 1], names=["x", "y"]).groupby("x")["y"].first()
    least = int(random.integers(1, 64))

    def phases(batch: Array, length: Array) -> Array:
        return np.array([table.loc[length.astype(int)].to_numpy(float) * MIB] * 4)

    return Truth(phases, "none", known=np.array([x for x in table.index if x >= least], float))


def end_gap(random: Random) -> Truth:
    """Draw a hinge with the knot in the first or last gap: one side has one length."""
    return hinge(random, *((128, 256) if random.random() < 0.5 else (1536, 2048)))


def plateau(random: Random) -> Truth:
    """Draw a flat piece, then a parabola."""
    a, b, c = random.uniform(4, 12) * 1024 * MIB, random.uniform(0.2, 2) * MIB, random.uniform(0.001, 0.004) * MIB
    base = a - (b * 500 + c * 500**2) * random.uniform(0.3, 1.5)
    return _alone(lambda x: np.maximum(a, base + b * x + c * x * x), "plateau")


def three_lines(random: Random) -> Truth:
    """Draw a flat piece, a line and a steeper line."""
    a, b, k = random.uniform(4, 16) * 1024 * MIB, random.uniform(0.5, 2) * MIB, random.uniform(260, 700)
    c, m = random.uniform(0.5, 3) * MIB, random.uniform(1000, 1500)
    return _alone(lambda x: a + b * np.maximum(0, x - k) + c * np.maximum(0, x - m), "hinge2")


def softened(random: Random) -> Truth:
    """Draw a flat piece that rises along a hyperbola, which is none of the fitter's kinds."""
    a, b, k = random.uniform(4, 16) * 1024 * MIB, random.uniform(0.8, 6) * MIB, random.uniform(300, 1400)
    w = random.uniform(20, 200)
    return _alone(lambda x: a + b * ((x - k) + np.sqrt((x - k) ** 2 + w * w)) / 2, "none")


@dataclass(frozen=True)
class Cell:
    """A case to test. `beside`: predicted rows with phases, off by a constant and a share of each, up to 1.8 times the
    longest length. `contradicted`: one more length ran out of memory, for another reason. `foreign`: imported rows."""

    name: str
    truth: Callable[[Random], Truth]
    noise: str
    lengths: str
    batches: tuple[int, ...] = (1,)
    foreign: bool = False
    beside: bool = False
    contradicted: bool = False
    metric: str = "peak_allocated_bytes"


def cells() -> Iterator[Cell]:
    """Yield all cells of the table."""
    for noise in ("512 B", "2 MiB", "0 to 3 %"):
        for lengths in ("6", "7", "8 geometric"):
            yield Cell("own rows", made_up, noise, lengths)
        yield Cell("own rows, batches 1 2 4", made_up, noise, "6", (1, 2, 4))
        yield Cell("own rows, replayed", replayed, noise, "6")
        yield Cell("own rows, with a prediction", made_up, noise, "3", beside=True)
        yield Cell("own rows, replayed, with a prediction", replayed, noise, "3", beside=True)
        yield Cell("own rows, with a prediction", made_up, noise, "4", beside=True)
        yield Cell("own rows, reserved", made_up, noise, "6", metric="peak_reserved_bytes")
    for name, truth in (("line", line), ("hinge", hinge), ("hinge, knot in an end gap", end_gap)):
        for noise in ("512 B", "2 MiB", "20 MiB blocks", "0 to 3 %"):
            yield Cell(f"imported rows, {name}", truth, noise, "7", foreign=True)
    for noise in ("2 MiB", "20 MiB blocks"):
        more: dict[str, Any] = {"foreign": True, "metric": "peak_reserved_bytes"}
        yield Cell("imported rows, out of memory", out_of_memory, noise, "7", **more)
        yield Cell("imported rows, out of memory for another reason", hinge, noise, "7", contradicted=True, **more)
    if PUBLIC.is_file():
        yield Cell("imported rows, a public sweep", published, "none", "7", foreign=True)
    for name, truth in (("flat, then parabola", plateau), ("three lines", three_lines), ("softened", softened)):
        for noise in ("512 B", "2 MiB"):
            yield Cell(f"imported rows, {name}", truth, noise, "8 geometric" if truth is not three_lines else "7",
                       foreign=True)  # fmt: skip


def rows(truth: Truth, noise: Noise, batches: Sequence[int], lengths: Sequence[int], random: Random) -> pd.DataFrame:
    """Return measured rows of a truth, one a batch and length; `attrs` has what was made up of reserved memory."""
    batch, length = (np.array(v, float) for v in zip(*((b, s) for b in batches for s in lengths), strict=True))
    phases = np.array([noise(y, random) for y in truth.phases(batch, length)])
    frame = pd.DataFrame(
        {
            "trial_id": [f"b{b:g}s{s:g}" for b, s in zip(batch, length, strict=True)],
            "outcome": "ok", "device": "cuda", "micro_batch": batch.astype(int), "seq_len": length.astype(int),
            "memory_source": "cuda_allocator", "attention_effective": truth.attention,
            "peak_allocated_bytes": phases.max(axis=0).round(),
        }
    )  # fmt: skip
    for phase, y in zip(PHASES, phases, strict=True):
        frame[f"{phase}_peak_allocated_bytes"] = y.round()
    share, more = random.uniform(0.01, 0.25), random.uniform(20, 800) * MIB
    frame["peak_reserved_bytes"] = np.ceil(noise(phases.max(axis=0) * (1 + share) + more, random) / (2 * MIB)) * 2 * MIB
    frame[["rank_peak_allocated_bytes", "rank_peak_reserved_bytes"]] = None
    frame["device_total_bytes"] = frame["memory_limit_bytes"] = np.nan
    frame.attrs = {"share": share, "more": more}
    return frame.sort_values(["micro_batch", "seq_len"], ignore_index=True)


def fitted(cell: Cell, truth: Truth, random: Random) -> tuple[Fit, dict[str, float]]:
    """Return the fit of the first batch, and the made-up share and bytes of its reserved memory."""
    metric = METRICS[cell.metric]
    lengths, batches = truth.lengths(LENGTHS[cell.lengths]), cell.batches if truth.known is None else (truth.batch,)
    frame = rows(truth, NOISES[cell.noise], batches, lengths, random)
    if cell.foreign:
        x, y = (frame[c].to_numpy(float) for c in ("seq_len", "peak_allocated_bytes"))
        fits = y <= truth.capacity
        bounds = x[~fits], np.full(int((~fits).sum()), truth.capacity)
        if cell.contradicted:
            bounds = np.array([round(random.uniform(min(x), 1.5 * max(x)))], float), np.array([3 * max(y)])
        fit = fit_points(Points(x[fits], y[fits], tuple(frame["trial_id"][fits]), *bounds), metric)
    else:
        group = Group({}, frame, np.flatnonzero(frame["micro_batch"] == batches[0]), {})
        predicted = None
        if cell.beside:
            shift, shares = random.uniform(-200, 400) * MIB, random.uniform(0.98, 1.02, (4, 1))  # so that knots move
            dense = sorted({int(truth.nearest(s)) for s in np.linspace(16, 1.8 * max(lengths), 22)} | {*lengths})
            off = Truth(lambda b, s: truth.phases(b, s) * shares - shift, attention=truth.attention)
            predicted = Whole(rows(off, lambda y, _: y, batches, dense, random))
        fit = fit_points(observations(group.frame, metric), metric, group, knows=Knows(Whole(frame), predicted))
    assert fit is not None
    return fit, {str(name): float(value) for name, value in frame.attrs.items()}


def drawn(cell: Cell, random: Random) -> Drawn:
    """Draw a truth of a cell, fit it, and score the fit at both new runs."""
    truth = cell.truth(random)
    fit, made = fitted(cell, truth, random)
    lengths = np.unique(fit.points.x)
    gap = random.integers(len(lengths) - 1)
    between = 8 * round(random.uniform(lengths[gap], lengths[gap + 1]) / 8)  # `on_grid` has others
    at = np.array([truth.nearest(between), truth.nearest(2 * lengths[-1])])
    one = np.full(2, float(truth.batch))
    exact = truth.phases(one, at).max(axis=0)
    new = np.array([NOISES[cell.noise](y, random) for y in truth.phases(one, at)]).max(axis=0)
    if cell.metric == "peak_reserved_bytes" and not cell.foreign:
        exact = exact * (1 + made["share"]) + made["more"]
        new = NOISES[cell.noise](new * (1 + made["share"]) + made["more"], random)
        exact, new = (np.ceil(y / (2 * MIB)) * 2 * MIB for y in (exact, new))
    found = fit.predict(at)
    holds = (found.new_low <= new) & (new <= found.new_high)
    width = (found.new_high - found.new_low) / exact
    miss = np.maximum(found.new_low - new, 0) + np.maximum(new - found.new_high, 0)
    score = float(width[1] + 40 * miss[1] / exact[1])
    error = abs(float(found.value[1] / (exact[1] + MEANS.get(cell.noise, 0.0) * exact[1]) - 1))
    return Drawn(bool(holds[0]), bool(holds[1]), float(width[0]), float(width[1]), score, fit.identified, error,
                 fit.chosen.model.kind == truth.kind)  # fmt: skip


def measure(cell: Cell, draws: int, seed: int) -> dict[str, Any]:
    """Return a line of the table, by column."""
    name = cell.name.replace("imported", "foreign").replace("with a", "beside a")  # as before: the same draws
    random = np.random.default_rng([seed, *f"{name} {cell.noise} {cell.lengths}".encode()])
    found = [drawn(cell, random) for _ in range(draws)]
    known = [one for one in found if one.identified]
    return {
        "rows": cell.name,
        "noise": cell.noise,
        "lengths": cell.lengths,
        "cover inside": float(np.mean([one.inside for one in found])),
        "at twice": float(np.mean([one.beyond for one in found])),
        "width inside": float(np.median([one.width for one in found])),
        "width at twice": float(np.median([one.width_beyond for one in found])),
        "score at twice": float(np.mean([one.score for one in found])),
        "identified": len(known) / draws,
        "error, identified": float(np.median([one.error for one in known])) if known else float("nan"),
        "right kind": float(np.mean([one.right for one in found])) if cell.foreign else float("nan"),
    }


@dataclass(frozen=True)
class Grid:
    """`count` multiples of `step` from `first` to `last` in a sweep, and `others` lengths that 8 does not divide;
    `sweep` has bytes by length."""

    name: str
    sweep: pd.Series
    metric: str
    count: int
    step: int
    others: int = 0
    first: int = 128
    last: int = 2048

    def known(self) -> Array:
        """Return the multiples of `step` that the sweep has, from `first` to `last`."""
        at = self.sweep.index.to_numpy(float)
        known: Array = at[(at % self.step == 0) & (at >= self.first) & (at <= self.last)]
        return known


def grids() -> Iterator[Grid]:
    """Yield all grids of the table."""
    sweeps: list[tuple[str, str, pd.Series]] = []
    for path in (PUBLIC, PUBLIC.with_name("with-expandable-segments-half.csv")):
        if path.is_file():
            table = pd.read_csv(path, header=None).groupby(0).first() * MIB
            sweeps += [(path.stem, metric, table[i]) for i, metric in ((1, "active"), (2, "reserved"))]
    replayed = pd.read_csv(REPLAYED_LENGTHS).groupby("configuration")
    for name, mine in replayed:
        for metric in ("allocated", "reserved"):
            sweeps.append((str(name), metric, mine.set_index("seq_len")[f"peak_{metric}_bytes"]))
    for name, metric, sweep in sweeps:
        replay = ", " in name
        last_ones = (int(sweep.index.max()),) if replay else (2048, 1024)
        for step, last, count in product((64,) if replay else (64, 128), last_ones, (4, 6, 8, 12)):
            grid = Grid(name, sweep, f"peak_{metric}_bytes", count, step, last=last)
            if len(grid.known()) >= count and not (replay and count in (6, 12)):
                yield from [replace(grid, others=n) for n in ((0, 1, 3) if count == (8 if replay else 6) else (0,))]


def on_grid(grid: Grid, draws: int, seed: int) -> dict[str, float]:
    """Return a line of the table of grids, by column: means over the draws."""
    random = np.random.default_rng([seed, *f"{grid.name} {grid.metric} {grid.count} {grid.step} {grid.last}".encode()])
    known = grid.known()
    asked = grid.sweep[(grid.sweep.index >= known[0]) & (grid.sweep.index <= known[-1])]
    found = []
    for i in range(draws):
        x = known[np.linspace(0, len(known) - 1, grid.count).round().astype(int)]  # even, then random
        if i:
            x = np.sort(np.append(random.choice(known[1:-1], grid.count - 2, replace=False), known[[0, -1]]))
        less_round = asked.index[asked.index % 8 != 0].to_numpy(float)
        x = np.sort(np.append(x, random.choice(less_round, grid.others, replace=False)))
        points = Points(x, grid.sweep[x].to_numpy(float), tuple(map(str, x)), np.empty(0), np.empty(0))
        fit = fit_points(points, METRICS[grid.metric])
        assert fit is not None
        others = asked[~asked.index.isin(x)].iloc[random.integers(3) :: 3]
        at, new = others.index.to_numpy(float), others.to_numpy(float)
        ends = fit.predict(at)
        wide = ends.new_high - ends.new_low
        miss = np.maximum(ends.new_low - new, 0) + np.maximum(new - ends.new_high, 0)
        even = at % 8 == 0
        covers = [float((miss[which] == 0).mean()) for which in (np.full(len(at), True), even, ~even)]
        found.append(
            [*covers, float(np.median(wide)) / 2 / MIB, float(np.mean(wide + 40 * miss)) / MIB, fit.identified]
        )
    names = ("cover", "of multiples of 8", "of others", "half-width", "score", "identified")
    return dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))


def show_grids(draws: int, seed: int, only: str, part: int, parts: int) -> None:
    """Print the table of grids."""
    names = ("cover", "of multiples of 8", "of others", "half-width", "score", "identified")
    print("| " + " | ".join(["sweep", "metric", "lengths", "multiples of", "up to", *names]) + " |")
    print("|---|---|---:|---:|---:|" + "---:|" * len(names))
    for grid in list(grids())[part::parts]:
        if only in f"{grid.name}, {grid.metric}":
            one = on_grid(grid, draws, seed)
            shown = [f"{one[n]:.0f}" if n in ("half-width", "score") else f"{one[n]:.2f}" for n in names]
            count = f"{grid.count} and {grid.others}" if grid.others else grid.count
            of = [grid.name, grid.metric, count, grid.step, f"{grid.known()[-1]:.0f}"]
            print("| " + " | ".join(map(str, [*of, *shown])) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, help="draws of each cell (default 500; with --grids 8)")
    parser.add_argument("--grids", action="store_true", help="fit usual grids, and check all other lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only cells whose name and noise contain this text")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth cell, beginning with cell I"
    )
    arguments = parser.parse_args()
    if arguments.grids:
        show_grids(arguments.draws or 8, arguments.seed, arguments.only, *arguments.part)
        return
    names = ["cover inside", "at twice", "width inside", "width at twice", "score at twice", "identified"]
    print("| " + " | ".join(["rows", "noise", "lengths", *names, "error, identified", "right kind"]) + " |")
    print("|---|---|---|" + "---:|" * 8)
    part, parts = arguments.part
    for cell in list(cells())[part::parts]:
        if arguments.only not in f"{cell.name}, {cell.noise}":
            continue
        one = measure(cell, arguments.draws or 500, arguments.seed)
        shown = [f"{one[n]:.2f}" for n in names[:2]] + [f"{100 * one[n]:.3g} %" for n in names[2:5]]
        right = "" if np.isnan(one["right kind"]) else f"{one['right kind']:.2f}"
        error = "–" if np.isnan(one["error, identified"]) else f"{100 * one['error, identified']:.2g} %"
        shown += [f"{one['identified']:.2f}", error, right]
        print("| " + " | ".join([one["rows"], one["noise"], one["lengths"], *shown]) + " |", flush=True)


if __name__ == "__main__":
    main()
