"""Sweeps without lengths: a command's own number, or the batch of samples, is the axis of tables, curves and fits."""

from dataclasses import replace

import pytest
import synthetic
from conftest import refusal

from vramsweep.analysis.model.fit import fit_table
from vramsweep.analysis.model.fit_wording import text
from vramsweep.analysis.model.memory_frontier import EDGE
from vramsweep.analysis.report import own_axis
from vramsweep.analysis.report.content import collect
from vramsweep.analysis.report.page import row_data
from vramsweep.analysis.report.summary import summary
from vramsweep.analysis.report.summary import text as on_screen
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.deterministic
COUNTS = (4, 16, 64, 256)
BASE, EACH = 100 << 20, 3 << 20  # bytes


def images(**more: object) -> list[Row]:
    """Rows of a command that was given images=4, ...: each image takes 3 MiB on top of 100 MiB."""
    rows = synthetic.curve(COUNTS, tokens_per_s=None, **more)
    for row, count in zip(rows, COUNTS, strict=True):
        size = BASE + count * EACH
        row |= {"seq_len": None, "micro_batch": None, "trial.runner.options.images": str(count), "samples_per_s": 50.0}
        row |= dict.fromkeys(("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes"), size)
    return rows


def batches() -> list[Row]:
    """The same rows as batches of a model without tokens."""
    return [row | {"micro_batch": int(row.pop("trial.runner.options.images"))} for row in images()]


@pytest.mark.parametrize(
    ("rows", "axis", "unit", "most"),
    [
        (images(), "images", "image", "images=256"),
        (
            [*images(), images()[0] | {"outcome": "invalid", "seq_len": 512, "trial_id": "no"}],
            "images",
            "image",
            "images=256",
        ),
        (batches(), "samples", "sample", "256 samples"),
    ],
)
def test_the_axis_has_its_own_words(rows: list[Row], axis: str, unit: str, most: str) -> None:
    table = own_axis.swap(synthetic.table(rows))
    assert (table.axis, table.tokens) == (axis, False)
    screen = summary(table)
    [line] = screen.lines
    assert (line.fits, line.mib_per_token, line.samples_per_s) == (256, 3.0, 50.0)
    shown = on_screen(screen, 120)
    assert f"MiB per {unit}: growth of memory" in shown and "samples/s" in shown and "token" not in shown
    assert screen.findings[0] == f"All that was tried fits: up to {most}. More was not tried."
    [fit] = fit_table(table, ("peak_allocated_bytes",), axis=axis)[0]
    told = own_axis.reword(text(fit), table)
    assert f"3,145,728 bytes per {unit}" in told and "100.0 MiB" in told and "token" not in told


def test_no_figure_tile_or_table_speaks_of_tokens() -> None:
    content = collect(synthetic.table(images()))
    drawn = {one.name: one for one in content.figures}
    curve = drawn["memory_by_length"]
    assert curve.title.startswith("Peak memory against images") and list(curve.data["images"].unique()) == [*COUNTS]
    assert any("images=%{x:,}" in (trace.hovertemplate or "") for trace in curve.plot.data)
    said = [
        content.card,
        content.findings,
        content.warnings,
        content.fit_text,
        *(t[2].to_string() for t in content.tables),
    ]
    assert "token" not in f"{said} {[one.plot.to_json() + one.caption for one in content.figures]}"
    assert "samples over the time" in content.methods
    assert "predict --largest" not in f"{content.card} {own_axis.reword([EDGE], content.table)}"
    assert content.card.cost.value == "3 MiB per image" and content.then.startswith("Measure images=")
    found = row_data(content.table, content.picker)
    assert (found["axis"], found["rate"], found["length"]) == ("images", "samples/s", [*COUNTS])


def test_tokens_keep_their_length_and_others_their_settings() -> None:
    ours = synthetic.table(synthetic.curve((64, 128)))
    assert own_axis.swap(ours) is ours and own_axis.reword(["at 64 tokens"], ours) == ["at 64 tokens"]
    sizes = [row | {"trial.runner.options.size": size} for size in ("32", "64") for row in images()]
    for number, row in enumerate(sizes):
        row["trial_id"] = str(number)
    lines = summary(own_axis.swap(synthetic.table(sizes))).lines
    assert sorted(line.label for line in lines) == ["size 32", "size 64"]  # images has more values
    by_size = own_axis.swap(synthetic.table(sizes), "size")
    assert by_size.axis == "size" and set(by_size.frame["seq_len"]) == {32, 64}
    named = replace(by_size, axis="length")
    assert own_axis.reword("up to 64 tokens; 2 lengths", named) == "up to length=64; 2 values of length"
    assert "did you mean images?" in refusal(UserError, own_axis.swap, synthetic.table(images()), "image")
