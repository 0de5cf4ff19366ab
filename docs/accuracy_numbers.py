"""Numbers of accuracy, from the pages that own them: h100.md, h200.md and published_runs.md.

docs/reference.py writes the table of accuracy.md from them. `statements` are the sentences that README.md and
accuracy.md must have because of them; tests/test_docs.py looks for each.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
READINGS = DOCS.parent / "results" / "reference" / "validation" / "every_reading.csv"
# The tools of a table of accuracy.md: how their line begins there, and their name in published_runs.md.
TOOLS = {
    "16 bytes": "16 bytes a parameter",
    "[`accelerate": "accelerate estimate-memory",
    "DeepSpeed's": "DeepSpeed estimate_zero",
    "training_hub": "training_hub",
    "`MemTracker": "torch MemTracker",
}
COUNTERS = ("allocated", "active", "reserved", "device")


def cells(page: str, section: str, first: str) -> list[list[str]]:
    """Return the cells after those of `first`, of each line of a section of a page that begins with them."""
    text = (DOCS / f"{page}.md").read_text()
    part = re.split(r"(?m)^## ", text.partition(f"\n## {section}\n")[2])[0]
    lines = [line.removesuffix(" |") for line in part.splitlines() if line.startswith(f"| {first}")]
    return [line.removeprefix(f"| {first}").removeprefix(" | ").split(" | ") for line in lines]


def errors(card: str, when: str, counter: str) -> tuple[str, ...]:
    """Return readings, median, 90th percentile, within 1 % and worst of a GPU's page."""
    ((count, _, median, most, within, _, worst),) = [
        line for line in cells(card, "Predicted and measured", when) if line[1] == counter
    ]
    return count, median, most, within, worst


def published(grade: str, counter: str) -> tuple[str, ...]:
    """Return the figures of `errors` for published readings whose peak depends on batch and length."""
    found = cells("published_runs", f"Grade {grade}", f"{counter} | moves")
    ((count, _, _, _, median, most, within, worst, *_),) = found
    return count, median, most, within, worst


def fits() -> list[int]:
    """Return published runs: fitted and predicted to, ran out and predicted to, fitted and predicted to run out, and
    the other way round."""
    lines = [line[1:5] for line in cells("published_runs", "Which runs fit", "") if line[1].isdecimal()]
    return [sum(map(int, column)) for column in zip(*lines, strict=True)]


def largest(source: str, counter: str, run: str = "") -> tuple[int, float, float]:
    """Return readings, least and worst error (percent, signed) of a source's group with the largest error."""
    groups = []
    for of, kind, count, least, worst, _, _, name, *_ in cells("published_runs", "Large errors", ""):
        if (of, kind) == (source, counter) and run in name:
            small, large = (float(one.split()[0]) if one != "–" else 0.0 for one in (least, worst))
            groups.append((int(count), small, large))
    return max(groups, key=lambda group: abs(group[2]))


def _far(error: float) -> str:
    return f"{abs(error)} % too {'low' if error < 0 else 'high'}"


def lines() -> list[tuple[str, ...]]:
    """Return the lines of the table of accuracy: compared with, peak, and the figures of `errors`."""
    found = []
    for card in ("h100", "h200"):
        names = (f"[one {card.upper()}]({card}.md), before it was measured",
                 f"one {card.upper()}, with the fixes that followed")  # fmt: skip
        for when, name in zip(("blind", "now"), names, strict=True):
            found += [(name, counter, *errors(card, when, counter)) for counter in ("allocated", "reserved")]
    for grade in "AB":
        name = f"[published runs](published_runs.md), grade {grade}"
        found += [(name, counter, *published(grade, counter)) for counter in COUNTERS]
    return found


def statements() -> dict[str, list[str]]:
    """Return what the pages must say, by page: parts of sentences and of lines of tables."""
    return {"README.md": list(_readme()), "docs/accuracy.md": [*_accuracy(), *_failures(), *_tools()]}


def _readme() -> Iterator[str]:
    for card in ("h100", "h200"):
        count, median, _, within, worst = errors(card, "blind", "reserved")
        yield f"| {count} | {median} | {within} | {float(worst.split()[0]):+.{1 if card == 'h100' else 0}f} %"
    count, median, _, _, worst = published("A", "reserved")
    yield f"| {count} | {float(median.split()[0]):.1f} % | | {float(worst.split()[0]):.0f} %"
    fitted, out, wrongly, missed = fits()
    yield f"all {out} that ran out of memory" if not missed else f"{out} of the {out + missed} that ran out of memory"
    yield f"{wrongly} of the {fitted + wrongly} that fitted"


def _accuracy() -> Iterator[str]:
    blind = [errors(card, "blind", "reserved") for card in ("h100", "h200")]
    total, within = (sum(int(line[n]) for line in blind) for n in (0, 3))
    yield f"predicted {total} training runs of one GPU"
    yield f"within 1 % in {within} of them"
    yield f"reserved memory is {float(published('A', 'reserved')[1].split()[0]):.1f} % off in the median"
    fitted, out, wrongly, missed = fits()
    yield f"{'All' if not missed else f'{out} of the'} {out + missed} published runs that ran out of memory"
    yield f"Among the {fitted + wrongly} that fitted, {wrongly} are wrongly predicted"
    ((*_, middle, far, within),) = cells("published_runs", "Speed", "all")
    yield f"are {middle} off in the median; the 90th percentile is {far}."
    yield f"intervals cover {within.replace('of', 'of the')}."


def _failures() -> Iterator[str]:
    active, reserved = (largest("fine-tune-2024-04", counter)[2] for counter in ("active", "reserved"))
    assert max(active, reserved) < 0
    yield f"active memory is up to {_far(active)}, and reserved up to {-reserved} %"
    with READINGS.open(newline="") as file:
        eight = [row for row in csv.DictReader(file) if row["world_size"] == "8" and row["peak"] == "moves"]
    active_in, reserved_in = (
        [row["between_bounds"] == "True" for row in eight if row["counter"] == counter and row["between_bounds"]]
        for counter in ("active", "reserved")
    )
    word = "All" if all(active_in) else "Not all"
    yield f"{word} {len(active_in)} active peaks and {sum(reserved_in)} of {len(reserved_in)} reserved peaks"
    lines = cells("h200", "Predicted and measured", "")
    low, lower = (line[-1].split()[0].lstrip("-") for line in lines if "fsdp1" in line[0])
    yield f"{low} % and {lower} % below"
    yield f"up to {_far(largest('torchtitan', 'reserved')[2])}"
    yield f"up to {_far(largest('fms-acceleration', 'device', 'SantaCoder')[2])}"
    for source, counter in (("litgpt", "allocated"), ("milabench", "device")):
        count, least, most = largest(source, counter)
        yield f"{count} {counter} peaks are {abs(least):.0f} to {_far(round(most))}"


def _tools() -> Iterator[str]:
    page = (DOCS / "accuracy.md").read_text().splitlines()
    for begins, name in TOOLS.items():
        (line,) = [line for line in page if line.startswith(f"| {begins}")]
        *_, theirs, ours = line.removesuffix(" |").split(" | ")
        told = []
        own = iter(ours.split(", "))
        for off, counter in re.findall(r"(\d\S*) % of (\w+) \(\d+\)", theirs):  # as precise as it is stated
            ((readings, _, median, _, same, _),) = cells(
                "published_runs", "Next to other tools", f"{counter} | moves | {name}"
            )
            told.append((f"{_like(off, median)} % of {counter} ({readings})", f"{_like(next(own).split()[0], same)} %"))
        yield f"{', '.join(one for one, _ in told)} | {', '.join(one for _, one in told)} |"


def _like(stated: str, source: str) -> str:
    """Return the source's number with as many digits as the stated one has."""
    return f"{float(source.split()[0]):.{len(stated.partition('.')[2])}f}"
