"""Reference runs: what others measured and published, with the overrides that predict the same run, in YAML.

The format is described in benchmarks/published/README.md; what a file may say is checked here, and a mistake names file
and line. Pure, apart from reading the file. Not covered: predicting the runs (validate.py), how far off they are
(analysis/validation.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vramsweep.harness.errors import UserError

BYTES = {
    "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip
SECONDS = {"s": 1.0, "ms": 1e-3}
RATES = ("per card", "all")  # what a rate counts: one card's share, or all cards together
MEMORY = ("allocated", "active", "reserved", "device")
UNITS = {
    **dict.fromkeys(MEMORY, (*BYTES, "percent")),
    "step": tuple(SECONDS),
    "tokens/s": RATES,
    "samples/s": RATES,
    "outcome": (),
}
PHASES = ("load", "forward", "backward", "optimizer")  # of allocated and reserved
OUTCOMES = ("ok", "oom")
HERE = "{here}"  # in overrides: the folder of the file


@dataclass(frozen=True)
class Reading:
    """One number that was published. `value` is in bytes, seconds, or per second; for `outcome` there is `text`.

    `phase` is None for the whole run. `unit` is as it was published, for rates what they count. `line` is where it
    stands in the file.
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
    """One configuration that was measured. `overrides` are words of `vramsweep predict`; `cannot` says why there is no
    point in predicting it. `versions` are those of packages that ran, by name; `context` is in bytes, None where the
    source does not say it."""

    file: str
    line: int
    source: str
    title: str
    name: str
    grade: str
    overrides: tuple[str, ...]
    versions: Mapping[str, str]
    context: int | None
    cannot: str | None
    note: str
    readings: tuple[Reading, ...]

    @property
    def place(self) -> str:
        """Where the run stands: file and line."""
        return f"{self.file}:{self.line}"


class Mistakes(UserError):
    """What is wrong with a file, one text a mistake, each with file and line."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__("\n".join(texts))
        self.texts = tuple(texts)


def read(path: Path) -> tuple[list[Run], list[str]]:
    """The runs of a file, and what is wrong with others. Raises UserError for a file that holds no runs at all."""
    try:
        root = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; name a file of reference runs, as benchmarks/published/*.yaml"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text; a file of reference runs is YAML") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{where}: {getattr(error, 'problem', None) or 'no YAML'}") from None
    try:
        whole = _Node(root, str(path), 1)
        shared = _shared(whole)
        entries = list(whole.nodes("runs"))
    except _Wrong as error:
        raise UserError(str(error)) from None
    runs: dict[str, Run] = {}
    mistakes: list[str] = []
    for entry in entries:
        try:
            run = _run(entry, shared)
            if run.name in runs:
                raise _Wrong(f"{entry.place}: there is a run {run.name!r} already; names are unique in a file")
            runs[run.name] = run
        except Mistakes as error:
            mistakes += error.texts
    return list(runs.values()), mistakes


class _Wrong(Mistakes):
    def __init__(self, text: str) -> None:
        super().__init__([text])


class _Marked(dict[Any, Any]):
    """A mapping that knows its line."""

    line = 1


class _Loader(yaml.SafeLoader):
    """Plain values only; mappings know their lines, and a key that stands twice is a mistake."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> _Marked:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise yaml.constructor.ConstructorError(None, None, f"{key} stands twice", node.value[number][0].start_mark)
    found = _Marked(loader.construct_mapping(node, deep=True))
    found.line = node.start_mark.line + 1
    return found


class _Number(float):
    """A number that knows how it was written: 2.10 is another version than 2.1."""

    text = ""


def _number(loader: _Loader, node: yaml.ScalarNode) -> _Number:
    found = _Number(loader.construct_yaml_float(node))
    found.text = node.value
    return found


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


class _Node:
    """A mapping of the file, whose keys are asked for by kind. Raises _Wrong, with file and line."""

    def __init__(self, values: Any, file: str, line: int) -> None:
        self.file, self.line = file, getattr(values, "line", line)
        if not isinstance(values, Mapping):
            raise _Wrong(f"{self.place}: {values!r} is no mapping; see benchmarks/published/README.md")
        self._values = values

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def wrong(self, text: str) -> _Wrong:
        return _Wrong(f"{self.place}: {text}")

    def known(self, *keys: str) -> None:
        for key in self._values:
            if key not in keys:
                raise self.wrong(f"{key} is no key here; keys: {', '.join(keys)}")

    def text(self, key: str, otherwise: str | None = None) -> str:
        value = self._values.get(key, otherwise)
        if value is None:
            raise self.wrong(f"{key} is missing")
        if isinstance(value, (Mapping, list)):
            raise self.wrong(f"{key} must be a text")
        return str(value)

    def given(self, key: str) -> Any:
        return self._values.get(key)

    def words(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(word, str) and "=" in word for word in value):
            raise self.wrong(f"{key} must be a list of KEY=VALUE, as words of `vramsweep predict`")
        here = str(Path(self.file).resolve().parent)
        return tuple(word.replace(HERE, here) for word in value)

    def texts(self, key: str) -> dict[str, str]:
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(f"{key} must be a mapping, as {{transformers: 4.48.1}}")
        if bad := next((k for k, v in value.items() if v is None or isinstance(v, (bool, list, Mapping))), None):
            raise self.wrong(f"{key}.{bad} must be a version, as 4.48.1")
        return {str(k): getattr(v, "text", str(v)) for k, v in value.items()}

    def nodes(self, key: str) -> Iterator[_Node]:
        value = self._values.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{key} is missing, or no list")
        for one in value:
            yield _Node(one, self.file, self.line)


@dataclass(frozen=True)
class _Shared:
    source: str
    title: str
    grade: str | None
    overrides: tuple[str, ...]
    versions: Mapping[str, str]
    context: int | None


def _shared(whole: _Node) -> _Shared:
    whole.known("source", "title", "grade", "versions", "context", "overrides", "note", "runs")
    source = whole.text("source")
    return _Shared(
        source,
        whole.text("title", source.partition(" ")[0]),
        None if whole.given("grade") is None else _grade(whole),
        whole.words("overrides"),
        whole.texts("versions"),
        _context(whole),
    )


def _run(entry: _Node, shared: _Shared) -> Run:
    entry.known("name", "grade", "versions", "context", "overrides", "measured", "note", "cannot")
    if entry.given("grade") is None and shared.grade is None:
        raise entry.wrong("grade is missing, here and for the file; allowed is A or B")
    readings: list[Reading] = []
    mistakes: list[str] = []
    for node in entry.nodes("measured"):
        try:
            readings.append(_reading(node))
        except _Wrong as error:
            mistakes += error.texts
    if mistakes:
        raise Mistakes(mistakes)
    cannot = entry.given("cannot")
    return Run(
        entry.file,
        entry.line,
        shared.source,
        shared.title,
        entry.text("name"),
        _grade(entry) if entry.given("grade") is not None else str(shared.grade),
        later([*shared.overrides, *entry.words("overrides")]),
        entry.texts("versions") if entry.given("versions") is not None else shared.versions,
        shared.context if entry.given("context") is None else _context(entry),
        None if cannot is None else entry.text("cannot"),
        entry.text("note", ""),
        tuple(readings),
    )


def later(words: Sequence[str]) -> tuple[str, ...]:
    """Of words with the same key the last one, where the first stood."""
    return tuple({word.lstrip("+").partition("=")[0]: word for word in words}.values())


def _grade(node: _Node) -> str:
    grade = node.text("grade")
    if grade not in ("A", "B"):
        raise node.wrong(f"grade {grade}: allowed is A (script and versions are there) or B (configuration is clear)")
    return grade


def _context(node: _Node) -> int | None:
    if node.given("context") is None:
        return None
    number, _, unit = node.text("context").partition(" ")
    if unit not in BYTES or not number.replace(".", "", 1).isdigit():
        raise node.wrong(f"context {node.text('context')}: write a size with its unit, as 1343 MiB")
    return round(float(number) * BYTES[unit])


def _reading(node: _Node) -> Reading:
    node.known("quantity", "phase", "value", "unit", "of", "note")
    quantity, phase = node.text("quantity"), node.given("phase")
    if quantity not in UNITS:
        raise node.wrong(f"quantity {quantity}: allowed is {', '.join(UNITS)}")
    if phase is not None and (phase not in PHASES or quantity not in ("allocated", "reserved")):
        raise node.wrong(f"phase {phase}: allocated and reserved have one of {', '.join(PHASES)}, or none")
    note, value = node.text("note", ""), node.given("value")
    if quantity == "outcome":
        if value not in OUTCOMES:
            raise node.wrong(f"outcome {value}: allowed is {' or '.join(OUTCOMES)}")
        return Reading(quantity, None, None, str(value), "", note, node.line)
    unit = node.text("unit")
    if unit not in UNITS[quantity]:
        raise node.wrong(f"unit {unit} of {quantity}: allowed is {', '.join(UNITS[quantity])}")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # 1e9, which YAML takes for a text
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise node.wrong(f"value {value}: a number above 0 is needed")
    if unit == "percent":
        number, _, of = node.text("of").partition(" ")
        if of not in BYTES or not number.replace(".", "", 1).isdigit():
            raise node.wrong(f"of {node.text('of')}: write the size that percent are of, as 95.04 GiB")
        scale = float(number) * BYTES[of] / 100
    else:
        scale = BYTES.get(unit) or SECONDS.get(unit, 1.0)
    return Reading(quantity, phase, float(value) * scale, None, unit, note, node.line)
