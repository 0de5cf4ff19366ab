"""Samples of varying lengths: the meaning of `data=lengths:...`, lengths drawn from it, shapes of the batches.

    lengths:lognormal(MEDIAN,SIGMA)   tokens; two thirds lie between MEDIAN / e^SIGMA and MEDIAN * e^SIGMA
    lengths:FILE                      a list (JSON, or a length a line) or a histogram (a line is `length,count`)

Every sample's length is drawn independently, from the trial's seed alone. So all allocators, runners and machines train
on the same lengths, and a longer run only draws more of them. A sample longer than seq_len is cut to it. A file that
differs from the trial's fingerprint is refused, because its lengths would be another trial's. Pure, except for reading
the file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from vramsweep.harness.files import bounded_reads
from vramsweep.harness.messages.errors import EnvironmentFault, UserError
from vramsweep.harness.spec import runner_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

PREFIX = "lengths:"
LONGEST = 1 << 24  # tokens; lengths are cut to it, and then to seq_len
MOST = 10**15  # most samples of a histogram, which a float still counts exactly
LONGEST_OF_BATCH, FULL = "longest", "max"  # values of padding_to; any other is a multiple
WAYS = f"write {PREFIX}lognormal(MEDIAN,SIGMA), or {PREFIX}FILE"
CHANGED = "{} has changed since the sweep was planned; run the sweep again"
FORMS = "a JSON list, one length per line, or lines of length,count"
_LOGNORMAL = re.compile(r"lognormal\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)")
_CALL = re.compile(r"(\w+)\((.*)\)?")
_WHOLE = re.compile(r"([+-]?\d{1,18})(?:\.0*)?")  # as pandas writes counts
_COUNTS = re.compile(r"count|freq|number|samples|^n$", re.IGNORECASE)  # in a column's name


class LengthsError(UserError):
    """An error because the text after `lengths:`, or the file that it names, gives no lengths."""


@dataclass(frozen=True)
class Lognormal:
    """Lengths whose logarithms are normally distributed around that of `median` tokens, with deviation `sigma`."""

    median: float
    sigma: float

    def at(self, share: float) -> int:
        """Return the length, in tokens, that this share (between 0 and 1) of all samples stays below."""
        exponent = self.sigma * NormalDist().inv_cdf(share) if self.sigma else 0.0
        return max(1, round(min(self.median * math.exp(min(exponent, 700.0)), LONGEST)))


@dataclass(frozen=True)
class Listed:
    """Lengths in ascending order; `until[i]` samples are no longer than `lengths[i]`."""

    lengths: tuple[int, ...]
    until: tuple[int, ...]

    def at(self, share: float) -> int:
        """Return the length, in tokens, that this share (between 0 and 1) of all samples stays below."""
        return self.lengths[bisect_right(self.until, share * self.until[-1])]


Source = Lognormal | Listed


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank: `samples` of `width` tokens each, of which `kept` in all are not padding."""

    samples: int
    width: int
    kept: int

    @property
    def tokens(self) -> int:
        """Tokens of the batch, padding counted."""
        return self.samples * self.width

    @property
    def padded(self) -> bool:
        """Return whether any of the batch's tokens is padding."""
        return self.kept < self.tokens


def names_lengths(data: str) -> bool:
    """Return whether this value of `data` gives lengths."""
    return data.startswith(PREFIX)


def lengths_file(data: str) -> Path | None:
    """Return the file of lengths that a value of `data` names; None if it names none."""
    text = data.removeprefix(PREFIX)
    return None if not names_lengths(data) or not text or text.startswith("lognormal(") else Path(text)


def is_file(place: Path) -> bool:
    """Return whether a file exists; False also for a name at which pathlib raises, such as one that is too long."""
    try:
        return place.is_file()
    except OSError:
        return False


def source(data: str, fingerprint: str | None = None) -> Source:
    """Return the source of lengths. Raises LengthsError, or EnvironmentFault for a file with another fingerprint."""
    text = data.removeprefix(PREFIX)
    if (place := lengths_file(data)) is None:
        return _lognormal(data, text)
    if not is_file(place):
        if fingerprint is not None:
            raise EnvironmentFault(CHANGED.format(place))
        if (call := _CALL.fullmatch(text)) is not None:
            raise LengthsError(f"data={data}: there is no distribution {call[1]}, only lognormal; {WAYS}")
        raise LengthsError(f"data={data}: there is no file {place}; {WAYS}")
    state = place.stat()
    found, now = _listed(place, state.st_size, state.st_mtime_ns)
    if fingerprint not in (None, now):
        raise EnvironmentFault(CHANGED.format(place))
    return found


def _lognormal(data: str, text: str) -> Lognormal:
    if (found := _LOGNORMAL.fullmatch(text)) is None:
        raise LengthsError(f"data={data} names no lengths; {WAYS}")
    try:
        median, sigma = float(found[1]), float(found[2])
    except ValueError:
        raise LengthsError(f"data={data}: MEDIAN and SIGMA must be numbers, as in lognormal(512,0.8)") from None
    if not (1 <= median <= LONGEST and 0 <= sigma < math.inf):
        raise LengthsError(f"data={data}: MEDIAN must be 1 to {LONGEST:,} tokens, and SIGMA 0 or more")
    return Lognormal(median, sigma)


@lru_cache(maxsize=8)
def _listed(place: Path, size: int, changed_ns: int) -> tuple[Listed, str]:
    """Return a file's lengths and its SHA-256. It is read again only if its size or time of change differs."""
    try:
        content = bounded_reads.read_content(place)
        text = content.decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LengthsError(f"{place} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    counts: dict[int, int] = {}
    for length, count in _json(place, text) if text.startswith("[") else _lines(place, text):
        counts[min(length, LONGEST)] = counts.get(min(length, LONGEST), 0) + count
    kept = {length: counts[length] for length in sorted(counts) if counts[length]}
    if not kept:
        raise LengthsError(f"{place} holds no lengths; it must be {FORMS}")
    until = tuple(itertools.accumulate(kept.values()))
    if until[-1] > MOST:
        raise LengthsError(f"{place}: its counts sum to more than {MOST:,}; divide all of them by the same number")
    return Listed(tuple(kept), until), hashlib.sha256(content).hexdigest()


def _json(place: Path, text: str) -> Iterator[tuple[int, int]]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LengthsError(f"{place} is not JSON: {_short(str(error))}; it must be {FORMS}") from None
    for number, value in enumerate(values, 1):
        if type(value) not in (int, float) or not value >= 1 or value % 1:
            got = _short(json.dumps(value))
            raise LengthsError(f"{place}: entry {number} is {got}; a length must be a whole number from 1 up")
        yield int(min(value, LONGEST)), 1


def _lines(place: Path, text: str) -> Iterator[tuple[int, int]]:
    columns, swapped = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().removesuffix(",").split(",")]
        if cells == [""] or line.lstrip().startswith("#"):
            continue
        if not columns and not any(re.match(r"[-+.]?\d", cell) for cell in cells):  # names of columns
            swapped = [bool(_COUNTS.search(cell)) for cell in cells] == [True, False]
            continue
        columns = columns or len(cells)
        found = [_WHOLE.fullmatch(cell) for cell in cells]
        if columns > 2 or len(cells) != columns or None in found:
            raise LengthsError(
                f"{place}, line {number}: {_short(repr(line.strip()))} is not a length; the file must be {FORMS}"
            )
        values = [int(one[1]) for one in found if one]
        length, count = values[::-1] if swapped and columns == 2 else (values[0], values[1] if columns == 2 else 1)
        if length < 1 or count < 0:
            what = f"a length of {length}" if length < 1 else f"a count of {count}"
            raise LengthsError(f"{place}, line {number}: {what}; lengths must be at least 1, counts at least 0")
        yield length, count


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]} ... ({len(text):,} characters)"


def drawn(what: Source, seed: int, most: int) -> Iterator[int]:
    """Yield lengths without end, cut to `most` tokens; one seed always gives the same lengths."""
    draw = random.Random(seed)
    while True:
        yield min(what.at(max(draw.random(), 2.0**-54)), most)


def packed(lengths: Iterable[int], seq_len: int) -> Iterator[tuple[int, ...]]:
    """Join documents and cut them at seq_len; yield the lengths of the documents, or their parts, in each sample."""
    row: list[int] = []
    room = seq_len
    for length in lengths:
        while length:
            part = min(length, room)
            row.append(part)
            length -= part
            room -= part
            if not room:
                yield tuple(row)
                row, room = [], seq_len


def documents(trial: Trial, count: int) -> list[tuple[int, ...]]:
    """Return the lengths of the documents in each of the first `count` samples; without packing, one document each.

    Raises EnvironmentFault if they are drawn from a file that has changed.
    """
    what = source(trial.data, trial.fingerprints.get(str(lengths_file(trial.data))))
    lengths = drawn(what, trial.seed, trial.seq_len)
    samples = ((one,) for one in lengths) if trial.packing == "none" else packed(lengths, trial.seq_len)
    return list(itertools.islice(samples, count))


def width(longest: int, padding_to: str, seq_len: int) -> int:
    """Return the tokens that each sample of a batch is padded to, if its longest has `longest`."""
    if padding_to == LONGEST_OF_BATCH:
        return longest
    return seq_len if padding_to == FULL else -(-longest // int(padding_to)) * int(padding_to)


def batches(trial: Trial, steps: int) -> list[list[Batch]]:
    """Return the micro-batches of each of the first steps: pass by pass, and in each pass one a rank."""
    size, each = trial.micro_batch, trial.samples_per_step()
    lengths = [sum(one) for one in documents(trial, steps * each)]

    def batch(at: int) -> Batch:
        own = lengths[at : at + size]
        return Batch(size, width(max(own), trial.padding_to, trial.seq_len), sum(own))

    return [[batch(at) for at in range(step * each, (step + 1) * each, size)] for step in range(steps)]


def of_rank(step: Sequence[Batch], rank: int, world_size: int) -> Sequence[Batch]:
    """Return a rank's micro-batches of a step, in order."""
    return step[rank::world_size]


def protocol_steps(trial: Trial) -> int:
    """Return the number of warm-up, probe and measured steps."""
    return trial.protocol.warmup_steps + 1 + trial.protocol.measured_steps


def tokens_per_step(trial: Trial) -> float:
    """Return the tokens that a step sees over all ranks, padding counted: the mean of the first 16 steps."""
    some = batches(trial, 16)
    return sum(batch.tokens for step in some for batch in step) / len(some)


def length_columns(trial: Trial) -> dict[str, Any]:
    """Return the row's columns on the samples of the measured steps, of all ranks."""
    steps, each = protocol_steps(trial), trial.samples_per_step()
    measured = [b for step in batches(trial, steps)[-trial.protocol.measured_steps :] for b in step]
    lengths = [n for one in documents(trial, steps * each)[-trial.protocol.measured_steps * each :] for n in one]
    return {
        "padding_fraction": 1 - sum(b.kept for b in measured) / sum(b.tokens for b in measured),
        "shortest_document": min(lengths),
        "mean_document": sum(lengths) / len(lengths),
        "longest_document": max(lengths),
    }


def has_varying_lengths(trial: Trial) -> bool:
    """Return whether the shapes of the trial's batches vary; packed samples are all full."""
    return names_lengths(trial.data) and trial.packing == "none"


def one_length_settings(padded: bool) -> dict[str, str]:
    """Return settings that make every batch of a trial seq_len wide: with padding in each (`padded`), or with none."""
    return {"data": f"{PREFIX}lognormal({1 if padded else LONGEST},0)", "padding_to": FULL}


def lengths_problem(trial: Trial) -> Iterator[str]:
    """Yield reasons against the trial's data, its padding or its packing."""
    if not names_lengths(trial.data):
        if trial.padding_to != LONGEST_OF_BATCH and trial.runner.name not in runner_table.STARTING:
            yield (
                f"padding_to={trial.padding_to} needs data={PREFIX}..., whose samples differ in length; leave it out "
                "(samples of a text are padded to seq_len)"
            )
        return
    if trial.runner.name in runner_table.STARTING:
        yield f"data={trial.data}: the command of runner={trial.runner.name} reads its own data; use another runner"
        return
    try:
        source(trial.data)
    except LengthsError as error:
        yield str(error)
        return
    yield from _padding(trial)
    yield from _predicted(trial)


def _padding(trial: Trial) -> Iterator[str]:
    """Yield what is wrong with padding_to, one reason at most."""
    to = trial.padding_to
    if to not in (LONGEST_OF_BATCH, FULL) and (not to.isdecimal() or int(to) < 1):
        yield f"padding_to={to}: choose longest (of the batch), a multiple such as 64, or max (seq_len)"
    elif to != LONGEST_OF_BATCH and trial.packing != "none":
        yield f"padding_to={to} with packing={trial.packing}: packed samples are all full; leave one out"
    elif to.isdecimal() and trial.seq_len % int(to):
        near = max(trial.seq_len // int(to), 1) * int(to)
        yield (
            f"padding_to={to} would pad samples beyond seq_len={trial.seq_len}, which is no multiple of it; use "
            f"seq_len={near}"
        )


def _predicted(trial: Trial) -> Iterator[str]:
    """Yield why the trial cannot be predicted although it can be measured, one reason at most."""
    if trial.device.name != "simulated":
        return
    if trial.runner.name in runner_table.TARGETED:
        yield (
            f"data={trial.data} with runner={trial.runner.name} cannot be predicted, because it is unknown "
            "how the target uses a length; measure it, or use another runner"
        )
        return
    alone = trial.micro_batch == 1 and trial.padding_to == LONGEST_OF_BATCH
    if has_varying_lengths(trial) and trial.attention == "flash_attention_2" and not alone:
        yield (
            "attention=flash_attention_2 with padding of varying lengths cannot be predicted, because the number of "
            "tokens that are not padding varies by batch; use attention=sdpa, packing or micro_batch=1"
        )


def padded_tokens(padding: float, length: int) -> int:
    """Return how many of a synthetic sample's tokens are padding."""
    return round(padding * length)
