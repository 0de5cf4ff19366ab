"""Write the generated parts of these pages: `python docs/reference.py`; `make docs` does so first.

A part stands between `<!-- NAME -->` and `<!-- end of NAME -->` in a page; people write the text around it. Git keeps
whole pages, so that they can be read without building the site; tests/test_docs.py compares them with the code. To add
a part, add a line to PARTS and its two marks to a page.

Written elsewhere: docs/published_runs.md (`make validate`, an hour), the gallery of docs/results.md
(benchmarks/gallery.py) and the table of tested versions (benchmarks/versions.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CONF = HERE.parent / "conf"
sys.path[:0] = [str(HERE.parent), str(HERE)]

import accuracy_numbers  # noqa: E402

from vramsweep import verbs  # noqa: E402
from vramsweep.harness.allocator import config  # noqa: E402
from vramsweep.harness.config import conf_files, settings_reference  # noqa: E402
from vramsweep.harness.hardware import gpu_lookup, interconnects  # noqa: E402
from vramsweep.harness.rows import outcome, quality_flags, schema  # noqa: E402
from vramsweep.harness.spec import runner_table, shardings  # noqa: E402
from vramsweep.harness.spec.techniques import catalog, wording  # noqa: E402


@dataclass(frozen=True)
class Part:
    """A part that the code writes into the pages that have its marks: Markdown without a heading."""

    name: str
    text: Callable[[], str]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table. Cells are text; characters that would end a cell are escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


# The page that explains how to use a command; a command without one needs only its line and its --help.
GUIDES = {
    "sweep": "start", "run": "own_script", "status": "start", "predict": "will_it_fit", "advise": "explain",
    "explain": "explain", "timeline": "explain", "replay": "allocator_settings", "why": "ran_out", "diff": "explain",
    "report": "start", "fit": "fits", "frontier": "will_it_fit", "compare": "publish", "check": "publish",
    "calibrate": "how_prediction_works", "paper": "publish", "export": "import_results", "gpus": "gpus",
    "techniques": "techniques", "columns": "columns",
}  # fmt: skip


def commands() -> str:
    """Return the commands by section of `vramsweep --help`, each with the meaning of its exit status 1."""
    parts = []
    for section in verbs.SECTIONS:
        here = [verb for verb in verbs.VERBS if verb.section == section]
        rows = [(f"`vramsweep {verb.name}`", verb.line, verb.no or "", _guide(verb.name)) for verb in here]
        parts.append(f"### {section}\n\n" + table(("command", "what it does", "exit status 1 means", "guide"), rows))
    return "\n\n".join(parts)


def _guide(command: str) -> str:
    return f"[{page}]({page}.md)" if (page := GUIDES.get(command)) else ""


def statuses() -> str:
    return table(("exit status", "meaning"), [(str(number), meaning) for number, meaning in verbs.STATUSES.items()])


def _head(name: str, more: str, level: int = 2) -> str:
    """Return a heading and, if `more` is given, a sentence below it."""
    return f"{'#' * level} {name[0].upper()}{name[1:]}" + (f"\n\n{more[0].upper()}{more[1:]}." if more else "")


def _headings(text: str) -> str:
    """Turn the bold lines above tables, as terminals show them, into headings that a page can link to."""

    def heading(found: re.Match[str]) -> str:
        more = re.sub(r"^\((.*)\)$", r"\1", found[2].strip(" :"))
        return _head(found[1], more)

    return re.sub(r"(?m)^\*\*(\w+)\*\*(.*)$", heading, text)


def columns() -> str:
    found = (schema.markdown_table(), *(of.markdown_table() for of in (outcome, quality_flags, runner_table)))
    return _headings("\n".join(found)).replace("](docs/", "](")


def promised() -> str:
    """List the columns that stay, by group, and those that may change."""
    groups = dict.fromkeys(one.group for one in schema.COLUMNS)
    lines = {name: [f"`{one.name}`" for one in schema.COLUMNS if one.group == name and schema.is_stable(one)]
             for name in groups}  # fmt: skip
    may = [f"`{one.name}`" for one in schema.COLUMNS if not schema.is_stable(one)]
    kept = [(name, ", ".join(names)) for name, names in lines.items() if names]
    return f"{table(('group', 'columns that stay'), kept)}\n\nColumns that may change: {', '.join(may)}."


def techniques() -> str:
    """Return a table for each axis of techniques, and one of the settings that take any value."""
    parts = []
    head = ("value", "what it does", "needs", "not with", "tested", "proven on a GPU")
    for axis in catalog.AXES:
        rows = [(f"`{catalog.text(one.name)}`", one.meaning, wording.needs(one), ", ".join(_without(one)),
                 ", ".join(one.checked), "" if one.name == axis.default else one.proven or "unproven")
                for one in catalog.entries(axis.name)]  # fmt: skip
        default = "" if axis.default is None else f"; default `{catalog.text(axis.default)}`"
        if rows:
            parts.append(f"{_head(f'`{axis.name}`', axis.meaning + default)}\n\n{table(head, rows)}")
    free = [axis for axis in catalog.AXES if not catalog.entries(axis.name)]
    rest = [(f"`{axis.name}`", f"`{catalog.text(axis.default)}`", axis.meaning + _belongs(axis)) for axis in free]
    return "\n\n".join((*parts, "## Further settings\n\n" + table(("setting", "default", "meaning"), rest)))


def _belongs(axis: catalog.Axis) -> str:
    return "" if axis.of is None else f" (with `{axis.of[0]}={' or '.join(axis.of[1])}`)"


def _without(entry: catalog.Technique) -> list[str]:
    """List the settings that exclude the technique, as they are typed; a refused trial gives the reason."""
    ours = [runner for runner in runner_table.RUNNERS if not runner.user_code]
    used = [runner for runner in ours if runner.name in runner_table.technique_runners(entry)]
    runners = [f"runner={runner.name}" for runner in ours if runner not in used]
    reached = {name for runner in used for name in runner_table.shardings_of(runner)}
    left = reached - set(entry.shardings or reached)
    named = [f"sharding={sharding.name}" for sharding in shardings.SHARDINGS if sharding.name in left]
    excluded = [f"{name}={catalog.text(value)}" for name, values, _ in entry.excludes for value in values]
    return list(dict.fromkeys((*runners, *named, *excluded)))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def gpus() -> str:
    head = ("`device.gpu`", "nominal GiB", "reported GiB", "limit GiB", "memory GB/s", "fp32", "tf32", "fp16", "bf16",
            "link", "source")  # fmt: skip
    rows = []
    for gpu in gpu_lookup.GPUS:
        reported = "–" if gpu.reported_mib is None else f"{gpu.reported_mib / 1024:.2f}"
        limit = f"{gpu_lookup.memory_limit(gpu) / gpu_lookup.GIB:.2f}"
        rates = [_number(one and one / gpu_lookup.TERA) for one in (gpu.fp32, gpu.tf32, gpu.half, gpu.bf16)]
        rows.append((f"`{gpu.name}`", _number(gpu.memory_gib), reported, limit, _number(gpu.bandwidth / 1e9), *rates,
                     gpu.link or "–", gpu.source))  # fmt: skip
    return table(head, rows)


def links() -> str:
    rows = [(f"`{one.name}`", one.meaning, _number(one.bandwidth / interconnects.GB), one.source)
            for one in interconnects.LINKS]  # fmt: skip
    return table(("link", "what it is", "GB/s per GPU, one direction", "source"), rows)


def allocator_options() -> str:
    default = config.AllocatorConfig()
    rows = [(f"`{one.name}`", one.allowed, config.format_value(one, getattr(default, one.name)),
             one.since + " or earlier" * (one.since == config.OLDEST_TORCH), one.scope, one.meaning)
            for one in config.OPTIONS]  # fmt: skip
    return table(("option", "allowed", "default", "since torch", "acts on", "meaning"), rows)


_SAID = re.compile(r"\$\{vramsweep\.said:\w+,(.*)\}")  # a default that a runner or a ds_config may change
_SETTING = re.compile(r"([a-z_]+): +(.+?)(?: +# ?(.*))?$")


def _said(default: str) -> str:
    return found[1] if (found := _SAID.fullmatch(default)) else default


def settings() -> str:
    """Return the settings of conf/config.yaml that belong to no group, by its headings, with its comments. A setting
    without a comment gets the meaning of the column of its name. An unindented comment is a heading; an indented one
    continues the comment above it."""
    found: dict[str, list[list[str]]] = {}
    lines = (CONF / "config.yaml").read_text().split("\n# the trial\n")[1].split("\nhydra:\n")[0].splitlines()
    for line in ("# the trial", *lines):
        if line.startswith("#"):
            rows = found.setdefault(line.lstrip("# "), [])
        elif line.lstrip().startswith("#"):
            rows[-1][2] += " " + line.lstrip("# ")
        elif setting := _SETTING.match(line):
            name, default, meaning = setting.groups()
            known = schema.BY_NAME[name].meaning if name in schema.BY_NAME else ""
            rows.append([f"`{name}`", f"`{_said(default)}`", meaning or known])
    parts = []
    for heading, rows in found.items():
        name, _, more = heading.partition(": ")
        parts.append(f"{_head(name, more, 3)}\n\n" + table(("setting", "default", "meaning"), map(tuple, rows)))
    return "\n\n".join(parts)


_STEPS = {"protocol.warmup_steps": "warm-up steps", "protocol.measured_steps": "measured steps"}


def groups() -> str:
    """Return each group of conf/: default, options (protocols with their numbers of steps), settings below it."""
    parts = []
    for group in sorted(settings_reference.groups(), key=lambda group: group.name):
        steps = _STEPS if group.name == "protocol" else {}
        head = (f"`{group.name}=`", "what it is", *steps.values())
        auto = conf_files.AUTO.get(group.name)
        rows: list[tuple[str, ...]] = [("`auto`", auto)] if auto else []
        for one in group.options:
            own = settings_reference.of_option(group.name, one.name) if steps else {}
            rows.append((f"`{one.name}`", one.meaning, *(own.get(key, "") for key in steps)))
        default = "auto" if group.name == "device" else conf_files.chosen_options()[group.name]
        default = settings_reference.defaults().get(group.name, default)
        parts.append(f"### `{group.name}`\n\nDefault: `{group.name}={default}`.\n\n" + table(head, rows))
        if further := [(f"`{one.key}`", f"`{one.default}`", one.meaning) for one in group.settings]:
            parts.append("Also:\n\n" + table(("setting", "default", "meaning"), further))
    return "\n\n".join(parts)


def accuracy() -> str:
    """The table of accuracy, from the pages that own its numbers."""
    head = ("compared with", "peak", "readings", "median error", "90th percentile", "within 1 %", "worst")
    return table(head, accuracy_numbers.lines()).replace("|" + " --- |" * 7, "|---|---|" + "---:|" * 5)


PARTS = (
    Part("accuracy", accuracy),
    Part("commands", commands),
    Part("exit statuses", statuses),
    Part("columns", columns),
    Part("promised columns", promised),
    Part("settings", settings),
    Part("groups", groups),
    Part("techniques", techniques),
    Part("gpus", gpus),
    Part("links", links),
    Part("allocator options", allocator_options),
)


_PAGE = re.compile(r"\(docs/(\w+)\.md\)")  # how the code's own texts name a page


def filled(text: str) -> str:
    """Fill every part for which a page has marks with the text that the code gives now."""
    for part in PARTS:
        begin, end = f"<!-- {part.name} -->", f"<!-- end of {part.name} -->"
        if begin in text:
            before, rest = text.split(begin)
            linked = _PAGE.sub(r"([\1](\1.md))", part.text().strip())
            text = f"{before}{begin}\n\n{linked}\n\n{end}{rest.split(end)[1]}"
    return text


def pages() -> list[Path]:
    return sorted(HERE.glob("*.md"))


if __name__ == "__main__":
    for page in pages():
        if (new := filled(old := page.read_text())) != old:
            page.write_text(new)
            print(f"{page.name}: written again")
