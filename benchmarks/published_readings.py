"""Reference runs in YAML: what others measured and published, with the overrides that predict the same run.

benchmarks/published/README.md describes the format. This module checks a file, and a mistake names file and line. Pure,
apart from reading the file. reference_runs.py predicts the runs, validation.py compares them.
"""

import contextlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from vramsweep.harness.files import bounded_reads
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.sweep.plan import SETTINGS

BYTES = {
    "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip
SECONDS = {"s": 1.0, "ms": 1e-3}
RATES = ("per card", "all")  # what a rate counts: one GPU's share, or all GPUs together
MEMORY = ("allocated", "active", "requested", "reserved", "device")
UNITS = {
    **dict.fromkeys(MEMORY, (*BYTES, "percent")),
    "step": tuple(SECONDS),
    "tokens/s": RATES,
    "samples/s": RATES,
    "outcome": (),
}
PHASES = ("load", "forward", "backward", "optimizer")  # of allocated and reserved
OUTCOMES = ("ok", "oom")
MOST = 10_000  # keys of a mapping
HERE = "{here}"  # in overrides: the folder of the file


@dataclass(frozen=True)
class Reading:
    """One number that was published. `value` is in bytes, seconds, or per second; for `outcome` there is `text`.

    `phase` is None for the whole run. `unit` is as published; for rates, what they count. `line` is its line in the
    file.
    """

    quantity: str
    phase: str | None
    value: float | None
    text: str | None
    unit: str
    note: str
    line: int


@dataclass(frozen=True)
class Run:
    """One configuration that was measured. `overrides` are words of `vramsweep predict`; `cannot` says why predicting
    it is pointless. `versions` are those of packages that ran, by name. `context` is in bytes, None if the source does
    not say it."""

    file: str
    line: int
    source: str
    title: str
    name: str
    grade: str
    overrides: tuple[str, ...]
    versions: Mapping[str, str]
    context: int | None
    cannot: str | None = None
    note: str = ""
    readings: tuple[Reading, ...] = ()

    @property
    def place(self) -> str:
        """File and line of the run."""
        return f"{self.file}:{self.line}"


def read(path: Path) -> tuple[list[Run], list[str]]:
    """Return the runs of a file, and its mistakes; a wrong reading does not drop the run's others. Raises UserError for
    a file that holds no runs at all."""
    try:
        root = yaml.load(bounded_reads.read_content(path, 1 << 24).decode(), Loader=_Loader)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; name a file of published runs, such as those in benchmarks/published"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; a file of published runs is YAML") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{where}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    except (ValueError, OverflowError, RecursionError) as error:  # from PyYAML itself: an invalid character, depth
        raise UserError(f"{path} cannot be read as YAML: {error}") from None
    try:
        whole = _Node(root, str(path), 1)
        shared = _shared(whole)
        entries = whole.entries("runs")
    except _Wrong as error:
        raise UserError(str(error)) from None
    runs: dict[str, Run] = {}
    mistakes: list[str] = []
    for value, line in entries:
        try:
            entry = _Node(value, str(path), line)
            run, wrong = _run(entry, shared)
            mistakes += wrong
            if run is not None and run.name in runs:
                raise entry.wrong(f"the file has another run '{_short(run.name)}'; give each run its own name")
            if run is not None:
                runs[run.name] = run
        except _Wrong as error:
            mistakes.append(str(error))
    return list(runs.values()), mistakes


class _Wrong(UserError):
    """A mistake in the file, with file and line."""


class _Marked(dict[Any, Any]):
    """A mapping that knows its line."""

    line = 1


class _Lines(list[Any]):
    """A list that knows the lines of its entries."""

    lines: Sequence[int] = ()


class _Loader(yaml.SafeLoader):
    """A loader of plain values. Mappings and lists know their lines, dates and numbers are text as written, and a
    duplicate key is a mistake."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # from Python's own conversions, which know no line
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge mappings, and limit their keys, because each merge of several may multiply them."""
        super().flatten_mapping(node)
        if len(node.value) > MOST:
            problem = f"more than {MOST:,} keys in a mapping"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> _Marked:
    own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # merged keys give way to these
    keys = [loader.construct_object(key, deep=True) for key in own]
    seen: set[Any] = set()
    for number, key in enumerate(keys):
        if not isinstance(key, Hashable):
            continue  # a list, about which PyYAML complains below
        if key in seen:
            problem = f"{_short(key)} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, own[number].start_mark)
        seen.add(key)
    found = _Marked(loader.construct_mapping(node, deep=True))
    found.line = node.start_mark.line + 1
    return found


def _sequence(loader: _Loader, node: yaml.SequenceNode) -> _Lines:
    found = _Lines(loader.construct_sequence(node, deep=True))
    found.lines = [one.start_mark.line + 1 for one in node.value]
    return found


def _written(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return a scalar as written, because 2.10 is not version 2.1, and YAML takes 1:30 for 90 and 010 for 8."""
    return str(node.value)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _sequence)
for _kind in ("timestamp", "float", "int"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _written)


class _Node:
    """A mapping of the file, whose keys are read by kind. Raises _Wrong, with file and line."""

    def __init__(self, values: Any, file: str, line: int) -> None:
        self.file, self.line = file, getattr(values, "line", line)
        if not isinstance(values, Mapping):
            raise _Wrong(f"{self.place}: {_short(values)} is not a mapping; see benchmarks/published/README.md")
        self._values = values

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def wrong(self, text: str) -> _Wrong:
        return _Wrong(f"{self.place}: {text}")

    def known(self, *keys: str) -> None:
        for key in self._values:
            if key not in keys:
                raise self.wrong(suggestions.no_such_value(_short(key), "key", _short(key), keys))

    def listed(self, key: str, value: Any, allowed: Iterable[str], of: str = "") -> None:
        """Raise what `wrong` makes, with what is allowed, for a value that is not listed; `of` says more of the key."""
        if value not in (names := list(allowed)):
            raise self.wrong(suggestions.no_such_value(f"{key} {_short(value)}", f"{key}{of}", _short(value), names))

    def text(self, key: str, otherwise: str | None = None) -> str:
        value = otherwise if self._values.get(key) is None else self._values[key]
        if value is None:
            raise self.wrong(f"{key} is missing")
        if isinstance(value, (Mapping, list)):
            raise self.wrong(f"{key} must be text")
        if isinstance(value, bool):
            raise self.wrong(f"{key} must be text; put it in quotes, because YAML takes yes and no for true and false")
        return str(value)

    def given(self, key: str) -> Any:
        return self._values.get(key)

    def words(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key, [])
        words = isinstance(value, list) and all(isinstance(word, str) for word in value)
        if not words or any("=" not in word or word.startswith("-") for word in value):
            raise self.wrong(f"{key} must be a list of settings KEY=VALUE, as `vramsweep predict` takes them")
        if of_sweep := next((word for word in value if _key(word) in SETTINGS), None):
            raise self.wrong(f"{_short(of_sweep)} is a setting of the whole command; move it to the command line")
        return tuple(_placed(word, str(Path(self.file).resolve().parent)) for word in value)

    def texts(self, key: str) -> dict[str, str]:
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(f"{key} must be a mapping, such as {{transformers: 4.48.1}}")
        if bad := next((k for k, v in value.items() if v is None or isinstance(v, (bool, list, Mapping))), None):
            raise self.wrong(f"{key}.{_short(bad)} must be a version, such as 4.48.1")
        return {str(k): str(v) for k, v in value.items()}

    def size(self, key: str) -> float:
        number, _, unit = self.text(key).partition(" ")
        with contextlib.suppress(ValueError):
            size = float(number) * BYTES.get(unit, math.nan)
            if 0 < size < math.inf:
                return size
        raise self.wrong(f"{key} {_short(self.text(key))}: write a size above 0 with its unit, such as 1343 MiB")

    def entries(self, key: str) -> list[tuple[Any, int]]:
        """Return the entries of the list, each with its line."""
        value = self._values.get(key)
        if not isinstance(value, _Lines) or not value:
            raise self.wrong(f"{key} is missing, empty or not a list")
        return list(zip(value, value.lines, strict=True))


def _short(value: Any) -> str:
    """Return a value on one line, a long one without its middle. Mappings and lists are only named, because YAML's
    aliases can make a small file endless when written out."""
    if isinstance(value, (Mapping, list)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    text = str(value)
    return repr(text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}")[1:-1]


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def quoted(value: str) -> str:
    """Return an override's value quoted, so that it is taken as text, whatever stands in it."""
    return '"' + value.replace('"', '\\"') + '"'


def _placed(word: str, here: str) -> str:
    """Return the word with the file's folder in it, quoted because its name may hold anything. What is already quoted
    or in brackets stays so."""
    key, _, value = word.partition("=")
    whole = value.replace(HERE, here)
    plain = HERE in value and (value.startswith(HERE) or value[0] not in "'\"[{")
    return f"{key}={quoted(whole) if plain else whole}"


def _shared(whole: _Node) -> Run:
    """Return what the file says of all its runs, as a run without a name and readings."""
    whole.known("source", "title", "grade", "versions", "context", "overrides", "note", "runs")
    source = whole.text("source")
    return Run(
        whole.file,
        whole.line,
        source,
        whole.text("title", source.partition(" ")[0]),
        "",
        "" if whole.given("grade") is None else _grade(whole),
        whole.words("overrides"),
        whole.texts("versions"),
        _context(whole),
    )


def _run(entry: _Node, shared: Run) -> tuple[Run | None, list[str]]:
    """Return the run with its right readings, None if there is none, and the mistakes of the others."""
    entry.known("name", "grade", "versions", "context", "overrides", "measured", "note", "cannot")
    if entry.given("grade") is None and not shared.grade:
        raise entry.wrong("grade is missing, here and for the file; allowed is A or B")
    readings: list[Reading] = []
    mistakes: list[str] = []
    for value, line in entry.entries("measured"):
        try:
            readings.append(_reading(_Node(value, entry.file, line)))
        except _Wrong as error:
            mistakes.append(str(error))
    try:
        run = replace(
            shared,
            line=entry.line,
            name=entry.text("name"),
            grade=shared.grade if entry.given("grade") is None else _grade(entry),
            overrides=later([*shared.overrides, *entry.words("overrides")]),
            versions=shared.versions if entry.given("versions") is None else entry.texts("versions"),
            context=shared.context if entry.given("context") is None else _context(entry),
            cannot=None if entry.given("cannot") is None else entry.text("cannot"),
            note=entry.text("note", ""),
            readings=tuple(readings),
        )
    except _Wrong as error:
        return None, [*mistakes, str(error)]
    return run if readings else None, mistakes


def later(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words, of those with the same key only the last one, where the first stood."""
    return tuple({_key(word): word for word in words}.values())


def _grade(node: _Node) -> str:
    if (grade := node.text("grade")) not in ("A", "B"):
        raise node.wrong(
            f"grade {_short(grade)}: allowed is A (script and versions are given) or B (configuration is clear)"
        )
    return grade


def _context(node: _Node) -> int | None:
    return None if node.given("context") is None else round(node.size("context"))


def _reading(node: _Node) -> Reading:
    node.known("quantity", "phase", "value", "unit", "of", "note")
    quantity, phase = node.text("quantity"), node.given("phase")
    node.listed("quantity", quantity, UNITS)
    if phase is not None and (phase not in PHASES or quantity not in ("allocated", "reserved")):
        raise node.wrong(f"phase {_short(phase)}: allowed is {', '.join(PHASES)}, for allocated or reserved")
    note, value = node.text("note", ""), node.given("value")
    if quantity == "outcome":
        node.listed("outcome", value, OUTCOMES)
        return Reading(quantity, None, None, str(value), "", note, node.line)
    unit = node.text("unit")
    node.listed("unit", unit, UNITS[quantity], f" of {quantity}")
    number = math.nan
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
    if not 0 < number < math.inf:
        raise node.wrong(f"value {_short(value)}: allowed is a number above 0")
    if unit == "percent" and number > 100:
        raise node.wrong(f"value {_short(value)}: allowed is up to 100 percent")
    scale = node.size("of") / 100 if unit == "percent" else BYTES.get(unit) or SECONDS.get(unit, 1.0)
    return Reading(quantity, phase, number * scale, None, unit, note, node.line)
