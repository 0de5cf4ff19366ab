"""Write a GPU's page: predictions compared with its rows, replays of its recordings, cold and warm trials, speed.

    python benchmarks/card_page.py results/reference/h100-80gb docs/h100.md [--figure docs/images/h100.png]

Everything is computed again from the folder's rows and recordings, which benchmarks/gpu_check.py made. This file has
the text between the tables. Predictions are of two kinds. The folder's rows of device=simulated are the present code's
(`python benchmarks/gpu_check.py FOLDER --only predicted` makes new ones). Those of blind.jsonl were made before anyone
looked at the GPU's recordings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import textwrap
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "benchmarks" / "card_pages.toml"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from card_page_speed import bounds, profile_lines, speed_lines  # noqa: E402

from vramsweep.analysis.figures.drawing import Picture, draw_one  # noqa: E402
from vramsweep.harness.allocator.replay import what_if  # noqa: E402
from vramsweep.harness.rows.schema import Row  # noqa: E402
from vramsweep.harness.spec.trial import Trial  # noqa: E402

MIB = 1 << 20
# Each recording is also replayed under the settings of these recordings of the same training.
CROSS = {
    "default": ("expandable", "roundup", "max_split", "gc", "retry", "out_of_memory"),
    "expandable": ("default", "roundup"),
    "roundup": ("default", "expandable"),
    "streams": ("streams_expandable",),
    "streams_expandable": ("streams",),
}
# The figure shows these sweeps, whose trials vary one setting each.
FACTORS = ("gpt2-trainer", "factors", "factors-cold", "techniques", "models")
PLAIN = ("model", "runner", "sharding", "precision")  # axes whose values need no name
SHOWN = (*PLAIN, "quantization", "adapter", "attention", "kernels", "loss", "checkpointing", "checkpointing_every",
         "checkpointing_reentrant", "activation_offload", "compile", "optimizer", "offload_optimizer", "offload_param",
         "padding", "padding_side", "packing", "use_cache", "grad_accum", "allocator")  # fmt: skip
DEFAULTS = {axis: Trial.model_fields[axis].default for axis in SHOWN} | {
    "runner": "torch", "allocator": "default", "optimizer": "default",
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """Texts of a page that no row has (card_pages.toml): title, what had been compared before, how long the GPU was
    used, what was wrong and how it was found, and what else it showed or did not."""

    title: str
    seen: str
    when: str
    wrong: str
    found: str
    left: str


def replays(folder: Path) -> Iterator[tuple[str, str, dict[str, Any], Any]]:
    """Yield each recording's replay under its own settings, then under others': (recording, recording of the settings,
    what was measured under them, the replay). Sizes in bytes."""
    told = json.loads((folder / "summary.json").read_text())["parts"]["recordings"]
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(folder / "recordings.zip") as archive:
        archive.extractall(scratch)
        for one in (name.removesuffix(".pickle") for name in archive.namelist()):
            if one not in told:  # it is of a trial that was predicted badly
                continue
            path, own = Path(scratch) / f"{one}.pickle", told[one]
            yield one, one, own, what_if(path, [], recorded_limit=own["limit_bytes"]).rows[0]
            for other in CROSS.get(one, ()):
                run = told[other]
                yield one, other, run, what_if(path, [run["conf"]], memory_limit=run["limit_bytes"]).rows[-1]


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs(rows: list[Row], predictions: list[Row] | None = None) -> list[tuple[Row, Row]]:
    """Return (measured, predicted) of each trial that ended ok in both, the last row of each. `predictions` replace the
    simulated rows of `rows`."""

    def trial(row: Row) -> str:
        # a prediction is for all repeats
        return json.dumps({k: v for k, v in row["trial"].items() if k not in ("device", "repeat")}, sort_keys=True)

    def last(rows: list[Row], device: str) -> dict[str, Row]:
        return {trial(row): row for row in rows if row["outcome"] == "ok" and row["device"] == device}

    predicted = last(rows if predictions is None else predictions, "simulated")
    return [(row, predicted[key]) for key, row in last(rows, "cuda").items() if key in predicted]


def label(row: Row) -> str:
    """Return a trial's label: the values of axes that are not at their default, then batch and length."""
    values = {axis: row["trial"].get(axis, DEFAULTS[axis]) for axis in SHOWN}
    words = {axis: v["name"] if isinstance(v, dict) else v for axis, v in values.items()}
    changed = {axis: w for axis, w in words.items() if w != DEFAULTS[axis]}
    said = [w if axis in PLAIN else f"{axis}={str(w).lower()}" for axis, w in changed.items()]
    return " · ".join([*said, f"{row['micro_batch']} × {row['seq_len']:,}"])


def off(measured: Row, predicted: Row, column: str) -> float:
    """Return predicted / measured - 1 of a column."""
    return float(predicted[column] / measured[column] - 1)


def mib(size: int) -> str:
    """Return bytes as a text in MiB."""
    return f"{size / MIB:,.1f}"


def page(folder: Path) -> str:
    """Return the page in Markdown."""
    summary = json.loads((folder / "summary.json").read_text())
    rows, blind = read(folder / "rows.jsonl"), read(folder / "blind.jsonl")
    both = pairs(rows)
    first = next((m for m, _ in both if m["deepspeed_version"]), both[0][0])
    named = {row["trial_id"]: (label(row), row) for row in rows if row["device"] == "cuda" and row["outcome"] == "ok"}
    bound_by = bounds(folder.name, named)
    words, parts = Words(**tomllib.loads(PAGES.read_text())[folder.name]), summary["parts"]
    gpu, image = summary["gpus"][0], f"![Prediction errors by configuration](images/{folder.name.split('-')[0]}.png)"
    lines = [
        f"# {words.title}",
        "",
        f"vramsweep predicted {len(pairs(rows, blind))} training runs without a GPU before one "
        f"{gpu['name'].removeprefix('NVIDIA ').split()[0]} measured them.",
        words.seen,
        "[Accuracy](accuracy.md) has the summary of all comparisons.",
        "",
        "## Predicted and measured",
        "",
        *_predicted(rows, blind, image),
        "",
    ]
    if "misses" in parts:
        lines += ["## Why predictions were off", "", *_misses(summary, rows, blind, words), ""]
    if "recordings" in parts:
        lines += [*_replayed(folder), ""]
    if (calls := folder / "operators.json").exists():
        lines += ["## Attention, call by call", "", *_calls(calls), ""]
    if any(m["sweep"] == "zero3" for m, _ in both):
        lines += ["## ZeRO-3 over lengths", "", *_curve(rows), ""]
    if any(row["trial"].get("compile", "none") != "none" for row in rows):
        lines += ["## Compiled", "", *_compiled(rows, bound_by), ""]
    if "isolation" in parts:
        lines += ["## Cold and warm trials", "", *_both_ways(summary, both), ""]
    speeds = speed_lines(folder.name, bound_by, sorted([(label(m), m, p) for m, p in both], key=lambda one: one[0]))
    lines += ["## Speed", "", *speeds, ""]
    if profiles := profile_lines(parts.get("profiles", {}), named, {label(m): p for m, p in both}):
        lines += [*profiles, ""]
    lines += [words.left.strip(), ""]
    lines += ["## Repeat it", "", *_repeat(folder), "", "---", ""]
    lines.append(
        f"{gpu['name']}, driver {gpu['driver']}, {summary['machine']['cores']} cores of a virtual machine; torch "
        f"{first['torch_version']}, transformers {first['transformers_version']}, deepspeed "
        f"{first['deepspeed_version']}, Python {first['python_version']}; {first['started_at'][:10]}, {words.when}. "
        "Predictions are with the same versions."
    )
    return "\n".join(wrapped(line) for line in lines) + "\n"


def wrapped(line: str) -> str:
    """Wrap a paragraph or an item at 120 characters; return tables, images and texts of several lines as they are."""
    if line.startswith(("|", "#", "!", "    ")) or "\n" in line:
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _repeat(folder: Path) -> list[str]:
    page = folder.name.split("-")[0]
    return [
        "```",
        f"python benchmarks/card_page.py {folder} docs/{page}.md     # this page",
        f"make gpu-check OUT={folder.parent}/NAME     # such a folder of your GPU",
        "```",
        "",
        f"`{folder}` has the rows, the blind predictions (`blind.jsonl`), the recordings and the residuals. "
        "[Checks](checks.md) describes `make gpu-check`.",
    ]


def _replayed(folder: Path) -> list[str]:
    lines = [
        "## The allocator, replayed",
        "",
        "Each recording is of GPT-2, batch 4, 256 tokens, bf16: loading and three steps, from the first allocation on. "
        "In *streams*, a second stream copies the next batch and takes the norms of gradients. *ddp* has one rank.",
        "",
        "Replayed under its own settings, each recording gives each segment event and each address:",
        "",
        "| recorded | settings | limit MiB | segment events | replayed the same | blocks at their addresses | "
        "retries | reserved MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    others = []
    for one, other, run, replay in replays(folder):
        if one != other:
            same = replay.peak_reserved == run["peak_reserved_bytes"]
            agree = (replay.retries, replay.out_of_memory is not None) == (run["retries"], run["out_of_memory"])
            others.append(
                f"| {one} | {other} | {mib(run['peak_reserved_bytes'])} | {mib(replay.peak_reserved)} | "
                f"{mib(replay.peak_reserved - run['peak_reserved_bytes']) if not same else 'none'} | "
                f"{run['retries']}{', then out of memory' if run['out_of_memory'] else ''} | "
                f"{'the same' if agree else replay.retries} |"
            )
            continue
        limit = "" if run["limit_bytes"] is None else mib(run["limit_bytes"])
        ended = ", then out of memory" if run["out_of_memory"] else ""
        conf = f"`{run['conf']}`" if run["conf"] else ""
        lines.append(
            f"| {one} | {conf} | {limit} | {replay.match.segment_events} | "
            f"{replay.match.matched} | {replay.match.blocks:,} | {run['retries']}{ended} | "
            f"{mib(run['peak_reserved_bytes'])} |"
        )
    lines += [
        "",
        "Replayed under the settings of another run of the same training, each recording gives the reserved memory "
        "that the other run measured:",
        "",
        "| recorded | replayed as | measured MiB | replayed MiB | difference | retries measured | replayed |",
        "|---|---|---:|---:|---:|---|---|",
        *others,
    ]
    return lines


def _predicted(rows: list[Row], blind: list[Row], image: str) -> list[str]:
    both = pairs(rows)
    first_of = {m["trial_id"]: p for m, p in pairs(rows, blind)}
    lines = [
        "| predictions | runs | counter | median error | 90th percentile | within 1 % | exact | worst |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
        *_accuracy(pairs(rows, blind), "blind"),
        *_accuracy(both, "now"),
        "",
        "*blind*: predicted before the GPU was used. *now*: predicted with the fixes that its recordings led to, so no "
        "longer blind. Errors are predicted / measured - 1. Median and 90th percentile are of absolute errors.",
        "",
        image,
        "",
        "A trial's name lists the settings that are not at their default, then batch × tokens.",
        "",
        "| trial | allocated MiB | blind | now | reserved MiB | blind | now |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for m, p in sorted(both, key=lambda pair: label(pair[0])):
        first = first_of.get(m["trial_id"])
        cells = [label(m)]
        for column in ("peak_allocated_bytes", "peak_reserved_bytes"):
            cells += [mib(m[column]), _signed(off(m, first, column)) if first else "", _signed(off(m, p, column))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _accuracy(both: list[tuple[Row, Row]], when: str) -> list[str]:
    lines = []
    for counter in ("allocated", "reserved"):
        errors = [off(m, p, f"peak_{counter}_bytes") for m, p in both]
        sizes = [abs(one) for one in errors]
        far = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
        lines.append(
            f"| {when} | {len(both)} | {counter} | {_share(statistics.median(sizes))} | {_share(far)} | "
            f"{sum(one <= 0.01 for one in sizes)} | {sum(not one for one in sizes)} | {_signed(max(errors, key=abs))} |"
        )
    return lines


def _misses(summary: dict[str, Any], rows: list[Row], blind: list[Row], words: Words) -> list[str]:
    """Return the table of trials whose reserved peak was off, recorded from their first allocation on."""
    wrong = {m["trial_id"]: (m, p) for m, p in pairs(rows, blind)}
    now = {m["trial_id"]: p for m, p in pairs(rows)}
    lines = [
        words.wrong.strip(),
        "",
        "| trial | segment events, all replayed | reserved MiB | blind | now |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in summary["parts"]["misses"].items():
        if not isinstance(one, dict) or name not in wrong:
            continue
        m, first = wrong[name]
        assert one["exact"] and one["matched"] == one["segment_events"]
        again = one["peak_reserved_bytes"]
        recorded = "" if again == m["peak_reserved_bytes"] else f" ({mib(again)} when recorded)"
        cells = [f"{one['segment_events']}", mib(m["peak_reserved_bytes"]) + recorded]
        cells += [_signed(off(m, p, "peak_reserved_bytes")) for p in (first, now[name])]
        lines.append(f"| {label(m)} | " + " | ".join(cells) + " |")
    return [*lines, "", words.found.strip()]


def _curve(rows: list[Row]) -> list[str]:
    """Return the table of ZeRO-3's rows by length, with and without expandable segments."""
    found = {(m["seq_len"], m["allocator"]): (m, p) for m, p in pairs(rows) if m["sweep"] == "zero3"}
    lines = [
        "Reserved MiB of Qwen1.5-0.5B with DeepSpeed, fp16, batch 1 and one rank, and the prediction error.",
        "",
        "| tokens | default | error | `expandable_segments:True` | error |",
        "|---:|---:|---:|---:|---:|",
    ]
    for length in sorted({length for length, _ in found}):
        cells = []
        for name in ("default", "expandable"):
            pair = found.get((length, name))
            cells += (
                [mib(pair[0]["peak_reserved_bytes"]), _signed(off(*pair, "peak_reserved_bytes"))] if pair else ["", ""]
            )
        lines.append(f"| {length:,} | " + " | ".join(cells) + " |")
    return lines


def _calls(path: Path) -> list[str]:
    """Return the table of attention kernels that ran, and the text on how a test compares the trace with them."""
    told = json.loads(path.read_text())
    ran = [one for one in told["attention"] if "kernel" in one]
    counts = Counter((one["dtype"], " and ".join(one["kernel"])) for one in ran)
    lines = [
        f"The GPU ran {len(ran)} calls of scaled_dot_product_attention with their backward passes, over shapes, masks, "
        f"dropout and shared heads, and {len(told['sums'])} sums over rows. For each call `{path}` has the kernel that "
        f"ran and each block that was requested and freed (torch {told['torch']}, cuDNN {told['cudnn']}).",
        "",
        "The trace takes the same kernel in all calls. It requests the same blocks in the same order in all but two "
        "kinds: flash attention, and the memory-efficient kernel with values of another width "
        "(`tests/runners/trace/test_operators_on_a_gpu.py`).",
        "",
        "| dtype | kernel | calls |",
        "|---|---|---:|",
    ]
    return [*lines, *(f"| {dtype} | {kernel} | {count} |" for (dtype, kernel), count in sorted(counts.items()))]


def _compiled(rows: list[Row], bound_by: dict[str, str]) -> list[str]:
    """Return the table of compiled trials and of the same training in eager mode; compiled ones are not predicted."""
    ok = [row for row in rows if row["device"] == "cuda" and row["outcome"] == "ok"]
    models = {row["model"] for row in ok if row["compile"] != "none"}
    kept = [row for row in ok if row["model"] in models]
    kept = [row for row in kept if row["compile"] != "none" or row["trial"]["optimizer"] == "adamw_torch"]
    eager = [row for row in kept if row["compile"] == "none"]
    of_host = sum(bound_by.get(label(row)) == "host" for row in eager)
    lines = [
        "Compiled trials are measured, and cannot be predicted. The rows with `optimizer=adamw_torch` are eager. The "
        f"host bounds the speed of {of_host} of the {len(eager)} eager trials, so their speed is not the GPU's.",
        "",
        "| trial | allocated MiB | reserved MiB | tokens/s | compiling s |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in sorted(kept, key=lambda row: (row["model"], row["compile"] != "none", row["compile"])):
        took = "" if row["compile_s"] is None else f"{row['compile_s']:.0f}"
        lines.append(
            f"| {label(row)} | {mib(row['peak_allocated_bytes'])} | {mib(row['peak_reserved_bytes'])} | "
            f"{row['tokens_per_s']:,.0f} | {took} |"
        )
    return lines


def _both_ways(summary: dict[str, Any], both: list[tuple[Row, Row]]) -> list[str]:
    part = summary["parts"]["isolation"]
    found = part.get("both_ways", {})
    warm = [m["overhead_s"] for m, _ in both if m["isolation"] == "warm" and m["overhead_s"] is not None]
    equal = sum(one["cold_and_warm_equal_to_the_byte"] for one in found.values())
    cold = ", ".join(f"{one['overhead_s']['cold']:.1f} s ({one['overhead_s']['warm']:.1f} s)" for one in found.values())
    times = part["fastest_step_s"]
    return [
        "A cold trial starts a fresh interpreter; a warm trial comes from the fork server. Overhead is a trial's time "
        "without its steps.",
        "",
        f"- Overhead warm: median {statistics.median(warm):.2f} s, {min(warm):.2f} to {max(warm):.2f} s in {len(warm)} "
        "trials. The slowest import peft or bitsandbytes, or make a model under ZeRO-3.",
        f"- {len(found)} trials ran cold and warm, and {equal} of them have equal memory in each column. Overhead cold "
        f"(warm): {cold}.",
        "- Qwen1.5-0.5B, 512 tokens, three cold and three warm trials in turns: overhead "
        f"{part['overhead_s']['cold']:.1f} s and {part['overhead_s']['warm']:.2f} s, fastest step "
        f"{1000 * times['cold']:.1f} and {1000 * times['warm']:.1f} ms. The verdict on tokens/s "
        f"is {part['speed_of_warm'].split(':')[0]}, because the speed of the host varies more.",
        "- These six trials reserved the same memory, and the cold ones allocated 512 bytes more: 4 bytes of "
        "torchaudio, which the model's code imports while it is made. Workers now import it before; the H200 ran "
        "with this fix.",
    ]


def _share(value: float) -> str:
    return f"{100 * value:.2g} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.2f} %"


def figure(folder: Path, path: Path) -> None:
    """Draw the prediction errors by configuration as a PNG."""
    import plotly.graph_objects as go

    rows, blind = read(folder / "rows.jsonl"), read(folder / "blind.jsonl")
    both = [pair for pair in pairs(rows) if pair[0]["sweep"] in FACTORS]
    both.sort(key=lambda pair: label(pair[0]), reverse=True)
    first = [pair for pair in pairs(rows, blind) if pair[0]["sweep"] in FACTORS]
    name = both[0][0]["gpu_name"].removeprefix("NVIDIA ").split()[0]
    drawn = go.Figure()
    for shown, column, which, symbol, colour in (
        (first, "peak_reserved_bytes", "reserved, blind", "diamond-open", "#c2571a"),
        (both, "peak_reserved_bytes", "reserved, now", "diamond", "#c2571a"),
        (first, "peak_allocated_bytes", "allocated, blind", "circle-open", "#1f5fa8"),
        (both, "peak_allocated_bytes", "allocated, now", "circle", "#1f5fa8"),
    ):
        marker = {"symbol": symbol, "color": colour, "size": 10 if symbol.endswith("open") else 7}
        values = [100 * off(m, p, column) for m, p in shown]
        names = [label(m) for m, _ in shown]
        drawn.add_trace(go.Scatter({"x": values, "y": names, "mode": "markers", "name": which, "marker": marker}))
    drawn.update_yaxes(categoryorder="array", categoryarray=[label(m) for m, _ in both], range=[-0.7, len(both) - 0.3])
    height = 22 * len(both) + 170
    drawn.add_vrect(x0=-1, x1=1, fillcolor="#888", opacity=0.12, line_width=0)
    drawn.update_layout(
        template="plotly_white", width=1000, height=height, margin={"l": 10, "r": 20, "t": 85, "b": 70},
        title={"text": f"Predicted without a GPU, compared with an {name}", "y": 1 - 15 / height, "yanchor": "top"},
        legend={"orientation": "h", "xref": "container", "x": 0.03, "yref": "container", "y": 1 - 75 / height,
                "yanchor": "bottom"},
        xaxis={"title": "predicted / measured − 1, %; shaded: within 1 %", "zeroline": True, "zerolinecolor": "#555"},
        yaxis={"automargin": True, "tickfont": {"size": 11}},
    )  # fmt: skip
    m = both[0][0]
    drawn.add_annotation(
        text=f"{m['gpu_name']}, torch {m['torch_version']}, transformers {m['transformers_version']}; {folder}",
        xref="paper", yref="paper", x=1, y=0, yshift=-62, showarrow=False, font={"size": 10, "color": "#666"},
    )  # fmt: skip
    draw_one(Picture(drawn, path))


def main() -> None:
    """Write the page, and the figure if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    arguments.page.write_text(page(arguments.folder))
    if arguments.figure:
        figure(arguments.folder, arguments.figure)


if __name__ == "__main__":
    main()
