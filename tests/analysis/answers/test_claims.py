"""Every claim against rows that confirm it, rows that refute it, and no rows, all fabricated; the tables of answers."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Cli, refusal

from vramsweep.analysis.answers import answer_table as answers
from vramsweep.analysis.answers import claims
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.journal import PLAN
from vramsweep.harness.rows.schema import Row, complete_row
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.techniques.catalog import DEFAULTS

pytestmark = pytest.mark.deterministic

GIB = 1 << 30
P = 1_000_000_000  # parameters of the made-up model


def row(peak: float = 10 * GIB, **values: Any) -> Row:
    """A predicted row of a made-up model; `peak` is what it allocates at most."""
    base = {
        "attempt": 1, "terminal": True, "outcome": "ok", "model": "made-up", "parameters": P, "trainable_parameters": P,
        "seq_len": 1024, "micro_batch": 1, "grad_accum": 1, "precision": "bf16", "allocator": "default",
        "allocator_conf": "", "runner": "torch", "sharding": "none", "world_size": 1, "device": "simulated",
        "offload_optimizer": False, "offload_param": False,
        "simulated_gpu": "h100-80gb", "weights": "random", "data": "synthetic", "protocol": "brief", "seed": 0,
        "repeat": 0, "memory_limit_bytes": 79 * GIB, "peak_allocated_bytes": int(peak),
        "peak_reserved_bytes": int(peak),
    }  # fmt: skip
    return complete_row({**DEFAULTS, **base, **values})


def table(*rows: Row) -> Table:
    return from_frame(pd.DataFrame([{**one, "trial_id": f"t{i}"} for i, one in enumerate(rows)]), "test")


def card(name: str, *rows: Row) -> claims.Card:
    rows = rows or (row(model="another", outcome="crash", peak_allocated_bytes=None),)
    return next(one for one in claims.cards(table(*rows)) if one.claim.name == name)


def checkpointed(saved: float) -> list[Row]:
    """The peak is the optimizer's, whatever the batch."""

    def one(batch: int, share: float, how: str) -> Row:
        forward = int(GIB * (5 + batch * share))
        return row(forward_peak_allocated_bytes=forward, micro_batch=batch, checkpointing=how)

    return [one(batch, *way) for batch in (1, 2, 4) for way in ((1, "none"), (1 - saved, "full"))]


def timed(cost: float) -> list[Row]:
    return [row(estimated_step_s=1.0), row(estimated_step_s=1 + cost, checkpointing="full")]


def attention(times: float) -> list[Row]:
    return [row(seq_len=2048), row(10 * GIB * times, seq_len=2048, attention="eager")]


def optimizers(saved: float) -> list[Row]:
    """Return rows with different forward peaks and the same whole peak, because another phase has that."""
    return [
        row(forward_peak_allocated_bytes=16 * P, optimizer="adamw_torch"),
        row(forward_peak_allocated_bytes=int((16 - saved) * P), optimizer="adamw_bnb_8bit"),
    ]


def loaded(share: float) -> list[Row]:
    return [
        row(load_peak_allocated_bytes=4 * P, precision="fp32"),
        row(load_peak_allocated_bytes=int(4 * P * share), precision="bf16"),
    ]


def batches(*peaks: float) -> list[Row]:
    return [row(GIB * peak, micro_batch=batch) for batch, peak in zip((1, 2, 4), peaks, strict=True)]


def lengths(kernel: str, linear: float, quadratic: float) -> list[Row]:
    def one(length: int) -> Row:
        at = length / 4096
        return row(GIB * (4 + linear * at + quadratic * at**2), seq_len=length, attention=kernel)

    phases = {"forward_peak_allocated_bytes": GIB, "backward_peak_allocated_bytes": GIB}
    flat = row(4 * GIB, seq_len=8, attention=kernel, optimizer_peak_allocated_bytes=4 * GIB, **phases)
    return [one(1024), one(2048), one(4096), flat]


def adapted(gb: float, **values: Any) -> list[Row]:
    seven = {"parameters": 7 * P, "trainable_parameters": 40_000_000, "adapter": "lora", "lora_r": 16}
    held = {"peak_reserved_bytes": int(gb * 1e9), "load_peak_allocated_bytes": 4 * P}
    return [row(**{**held, **seven, **values})]


def held(gb: float) -> list[Row]:
    """Activations make the whole step larger, which is no matter."""
    return adapted(30, optimizer_peak_allocated_bytes=int(gb * 1e9), precision="bf16_pure")


def accumulated(more: float) -> list[Row]:
    return [row(10 * P), row((10 + more) * P, grad_accum=4)]


def eight(*outcomes: str) -> list[Row]:
    return [
        row(precision=precision, parameters=70 * P, world_size=8, sharding="fsdp2", outcome=outcome,
            peak_reserved_bytes=78 * GIB if outcome == "ok" else None,
            unlimited_peak_reserved_bytes=158 * GIB if outcome == "oom" else None)
        for precision, outcome in zip(("bf16", "bf16_pure"), outcomes, strict=True)
    ]  # fmt: skip


def allocators(expandable: float) -> list[Row]:
    return [
        row(peak_reserved_bytes=10 * GIB),
        row(peak_reserved_bytes=int(10 * GIB * expandable), allocator="expandable", allocator_conf="expandable:True"),
    ]


PAPER = {"quantization": "nf4_double", "checkpointing": "full"}
CASES = [
    ("checkpointing-saves", checkpointed(0.65), 65, checkpointed(0.85), 85),
    ("checkpointing-costs", timed(0.3), 30, timed(0.1), 10),
    ("flash-attention", attention(12), 12, attention(1.8), 1.8),
    ("adam-8bit", optimizers(6), 6, optimizers(3), 3),
    ("autocast-weights", loaded(1.0), 100, loaded(0.5), 50),
    ("linear-in-batch", batches(6, 7, 9), 0, batches(6, 6, 9), 100 / 3),
    ("eager-quadratic", lengths("eager", 1, 3), 75, lengths("eager", 3, 1), 25),
    ("sdpa-linear", lengths("sdpa", 4, 0), 0, lengths("sdpa", 3, 1), 25),
    ("lora-7b", held(14.3), 14.3, held(19), 19),
    ("qlora-7b", adapted(6, quantization="nf4"), 6, adapted(9, **PAPER), 9),
    ("accumulation", accumulated(0), 0, accumulated(4), 4),
    ("70b-on-8", eight("oom", "ok"), 100 * 78 / 79, eight("oom", "oom"), 200),
    ("expandable-segments", allocators(0.9), -10, allocators(1.1), 10),
]


def test_every_claim_is_tested_here() -> None:
    assert [case[0] for case in CASES] == [claim.name for claim in claims.CLAIMS]
    assert all(claim.source.startswith("https://") for claim in claims.CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "confirming", "number", "refuting", "other"), CASES, ids=[c[0] for c in CASES])
def test_rows_decide(name: str, confirming: list[Row], number: float, refuting: list[Row], other: float) -> None:
    yes, no = card(name, *confirming), card(name, *refuting)
    assert (yes.verdict, no.verdict) == ("confirmed (predicted)", "refuted (predicted)")
    assert yes.found[0][1] == pytest.approx(number, abs=1e-6)
    assert no.found[0][1] == pytest.approx(other, abs=1e-6)
    assert yes.claim.shown.format(number) in yes.text()
    assert "predicted: h100-80gb" in no.text()
    nothing = card(name)
    assert (nothing.verdict, nothing.found) == ("not tested", ())
    assert nothing.text() == "no measured or predicted rows of a GPU can be compared"
    # of a card: what is predicted beside them does not decide, and is not said to be measured
    of_card = {"device": "cuda", "simulated_gpu": None, "gpu_name": "NVIDIA H100", "memory_limit_bytes": None,
               "device_total_bytes": 79 * GIB, "estimated_step_s": None}  # fmt: skip
    measured = [{**one, **of_card, "step_median_s": one["estimated_step_s"]} for one in confirming]
    found = card(name, *measured, *refuting)
    assert found.verdict == "confirmed" and found.text().endswith("measured: NVIDIA H100")


@pytest.mark.slow
def test_rows_that_differ_in_something_else_too_are_not_compared() -> None:
    """Nor in a setting that is named like the axis, which is no consequence of it."""
    one, other = timed(0.3)
    for setting, value in {
        "seq_len": 512, "simulated_gpu": "l4-24gb", "torch_version": "2.0", "checkpointing_every": 2,
        "checkpointing_reentrant": True, "checkpointing_ops": "save_matmuls", "bound_by": "host",
    }.items():  # fmt: skip
        assert card("checkpointing-costs", one, {**other, setting: value}).verdict == "not tested", setting


@pytest.mark.slow
def test_rows_of_other_limits_are_no_repeats_and_a_row_that_died_is_of_its_curve() -> None:
    one, other = timed(0.3)
    limit = {"memory_limit_bytes": 77 * GIB}
    assert card("checkpointing-costs", one, {**other, **limit}).verdict == "not tested"
    died = {**other, "outcome": "crash", "memory_limit_bytes": None, "torch_version": None}
    parts = claims.group_alike(table(one, {**one, **limit}, died).frame, "checkpointing")
    assert [len(part) for part in parts] == [1, 1, 1]  # which of the two it is of, nothing tells
    assert [len(part) for part in claims.group_alike(table(one, died).frame, "checkpointing")] == [2]


@pytest.mark.slow
def test_one_comparison_that_does_not_hold_refutes_and_comes_first() -> None:
    rows = [*timed(0.3), *({**one, "model": "b"} for one in timed(0.1))]
    found = card("checkpointing-costs", *rows)
    assert found.verdict == "refuted (predicted)"
    assert found.text() == (
        "10 % (b, 1,024 tokens, batch 1, bf16); 30 % (made-up, 1,024 tokens, batch 1, bf16). "
        "Holds in 1 of 2, predicted: h100-80gb"
    ).replace(", bf16", "")


@pytest.mark.slow
def test_a_card_that_ran_out_of_memory_and_cannot_say_what_it_needs_refutes() -> None:
    rows = [{**one, "device": "cuda", "unlimited_peak_reserved_bytes": None} for one in eight("oom", "oom")]
    found = card("70b-on-8", *rows)
    assert found.verdict == "refuted"
    assert found.text().startswith("out of memory (made-up") and "inf" not in found.text()


@pytest.mark.slow
def test_what_can_be_done_is_not_refuted_by_another_configuration() -> None:
    rows = [{**one, "sharding": "zero3"} for one in eight("oom", "oom")]
    assert card("70b-on-8", *rows).verdict == "not confirmed (predicted)"
    assert card("70b-on-8", *rows, *eight("oom", "oom")).verdict == "refuted (predicted)"
    assert card("qlora-7b", *adapted(9, quantization="nf4")).verdict == "not confirmed (predicted)"


@pytest.mark.slow
def test_a_prediction_confirms_what_no_gpu_has_tried() -> None:
    measured = [{**one, "device": "cuda"} for one in eight("oom", "oom")]
    assert card("70b-on-8", *measured, *eight("ok", "ok")).verdict == "refuted"
    offloaded = {**eight("ok", "ok")[0], "offload_optimizer": True, "host_peak_bytes": 1499 * 10**9}
    found = card("70b-on-8", *measured, offloaded)
    assert found.verdict == "confirmed (predicted)"
    assert "offload optimizer, 1,499 GB of host memory)" in found.text()
    assert card("70b-on-8", {**offloaded, "outcome": "host_oom"}).verdict == "refuted (predicted)"


def flat(*off: int) -> list[Row]:
    """A curve that says nothing of its growth, but for these bytes."""
    rows = [(n, 10 * GIB + byte) for n, byte in zip((1024, 2048, 3072, 4096), (*off, 0), strict=True)]
    return [row(peak, seq_len=n, attention="eager") for n, peak in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "other"),
    [
        ("adam-8bit", optimizers(3), {"precision": "bf16_pure"}),
        ("adam-8bit", optimizers(3), {"sharding": "zero1", "world_size": 8}),
        ("accumulation", accumulated(4), {"sharding": "fsdp2", "world_size": 8}),
        ("lora-7b", held(19), {"micro_batch": 8}),
        ("lora-7b", held(19), {"sharding": "fsdp2", "world_size": 8}),
        ("qlora-7b", adapted(6, **PAPER), {"seq_len": 2048}),
        ("linear-in-batch", batches(6, 6, 6.01), {}),
        *(("eager-quadratic", flat(*off), {}) for off in ((0, 0, 0), (0, 3, 1), (512, 0, 1024))),
    ],
)
def test_rows_that_do_not_test_a_claim_are_left_out(name: str, rows: list[Row], other: dict[str, Any]) -> None:
    assert card(name, *({**one, **other} for one in rows)).verdict == "not tested"


@pytest.mark.slow
def test_a_peak_that_loading_has_is_no_step_s() -> None:
    phases = {"forward_peak_allocated_bytes": GIB, "backward_peak_allocated_bytes": 2 * GIB}
    loads = {"load_peak_allocated_bytes": 3 * GIB, **phases}
    curve = lengths("eager", 1, 3)
    short = row(9 * GIB, seq_len=16, attention="eager", **loads)
    assert card("eager-quadratic", *curve, short).verdict.startswith("confirmed")
    assert card("eager-quadratic", *({**one, **loads} for one in curve)).verdict == "not tested"


@pytest.mark.slow
def test_other_ways_of_checkpointing_beside_change_nothing() -> None:
    rows = checkpointed(0.65)
    found = card("checkpointing-saves", *rows, {**rows[0], "checkpointing": "selective"})
    assert (found.verdict, round(found.found[0][1])) == ("confirmed (predicted)", 65)


@pytest.mark.slow
def test_a_figure_without_a_bound_refutes_both_ways_and_so_does_what_ran_out_of_memory() -> None:
    """However little that would need without a limit: it was in pieces, or the limit a share of the card."""
    assert card("lora-7b", *held(10)).verdict == "refuted (predicted)"
    rows = [{**one, "unlimited_peak_reserved_bytes": 70 * GIB} for one in eight("oom", "oom")]
    assert card("70b-on-8", *rows).verdict == "refuted (predicted)"


@pytest.mark.slow
def test_a_card_of_unknown_size_is_what_is_listed_by_its_name_or_none() -> None:
    unknown = dict.fromkeys(("memory_limit_bytes", "simulated_gpu", "unlimited_peak_reserved_bytes"))
    for name, verdict in (
        ("NVIDIA A100-SXM4-40GB", "not tested"),
        ("NVIDIA A100-SXM4-80GB", "refuted"),
        ("a card that no one lists", "not tested"),
    ):
        rows = [{**one, **unknown, "device": "cuda", "gpu_name": name} for one in eight("oom", "oom")]
        assert card("70b-on-8", *rows).verdict == verdict


@pytest.mark.slow
def test_what_another_runner_ran_out_with_is_still_predicted() -> None:
    measured = [{**one, "device": "cuda"} for one in eight("oom", "oom")]
    for other in ({"runner": "trainer"}, {"protocol": "paper"}, {"versions": "torch 2.4"}):
        found = card("70b-on-8", *measured, *({**one, **other} for one in eight("ok", "ok")))
        assert found.verdict == "confirmed (predicted)"
        assert next("=".join(one) for one in other.items()) in found.text()


def test_the_basis_is_of_the_cards_that_were_compared() -> None:
    found = card("checkpointing-costs", *timed(0.3), row(simulated_gpu="l4-24gb", estimated_step_s=2.0))
    assert found.basis == "predicted: h100-80gb"


@pytest.mark.slow
def test_of_several_optimizers_the_order_is_theirs_not_the_hash_s() -> None:
    more = [row(forward_peak_allocated_bytes=16 * P, optimizer=name) for name in ("default", "adamw_torch_fused")]
    found = card("adam-8bit", *optimizers(6), *more)
    assert [where.rpartition(" ")[2] for where, _ in found.found] == ["default", "adamw_torch", "adamw_torch_fused"]


@pytest.mark.slow
def test_why_a_claim_is_not_tested_is_said_in_few_reasons_of_what_could_not_be_compared() -> None:
    (crashed,) = ({**one, "outcome": "crash", "reason": "cannot be traced"} for one in adapted(6, quantization="nf4"))
    found = card("qlora-7b", crashed)
    assert (found.verdict, found.text()) == ("not tested", "cannot be traced")
    rows = [row(outcome="oom", reason=f"too small by {n}", seq_len=n) for n in range(1, 300)]
    said = card("accumulation", *rows).text()
    assert said == "too small by 1; too small by 2; too small by 3; and 296 more reasons"
    nothing = card("accumulation", *rows, row()).text()
    assert nothing == "no measured or predicted rows of a GPU can be compared"


@pytest.mark.slow
def test_seconds_of_two_kinds_are_not_compared() -> None:
    one, other = timed(0.3)
    found = card("checkpointing-costs", {**one, "calibrated_step_s": 5.0}, other)
    assert found.found[0][1] == pytest.approx(30)
    found = card("checkpointing-costs", {**one, "calibrated_step_s": 5.0}, {**other, "calibrated_step_s": 6.0})
    assert found.found[0][1] == pytest.approx(20)


def test_rows_of_a_cpu_decide_nothing() -> None:
    rows = [{**one, "device": "cpu"} for one in checkpointed(0.65)]
    assert card("checkpointing-saves", *rows).verdict == "not tested"


@pytest.mark.slow
def test_the_table_holds_every_card() -> None:
    frame, notes = claims.make(table(*timed(0.3)))
    assert len(frame) == len(claims.CLAIMS)
    assert list(frame.columns) == ["claim", "verdict", "found", "compared", "what decides", "source"]
    assert set(frame["verdict"]) == {"confirmed (predicted)", "not tested"}
    assert notes
    measured = [{**one, "device": "cuda", "step_median_s": one["estimated_step_s"]} for one in timed(0.3)]
    assert claims.make(table(*measured))[1] == []


pytestmark = pytest.mark.deterministic


def written(rows: list[Row], folder: Path, answer: Any) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({**one, "trial_id": f"t{i}", "sweep": folder.name}) for i, one in enumerate(rows)]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n")
    if answer is not None:
        (folder / PLAN).write_text(json.dumps({"answer": answer}))
    return folder


@pytest.mark.slow
def test_the_report_of_a_question_begins_with_its_answer(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "claims", "claims")
    said = cli.run("report", folder, "--images", "none").out
    assert "CONFIRMED (PREDICTED): Gradient checkpointing costs 20 to 33 % of time\n  found: 30 % (made-up" in said
    card = said[said.index("Are the guides right?") : said.index("\nnote: ")]
    assert max(map(len, card.splitlines())) <= 80
    page = (folder / "report.html").read_text()
    assert [id for id in re.findall('<section id="([a-z-]+)"', page) if id != "main-figure"][:3] == [
        "card", "answer", "findings",
    ]  # fmt: skip
    assert "<h3>Gradient checkpointing costs 20 to 33 % of time</h3><p><strong>confirmed (predicted)</strong>" in page
    assert '<a href="https://arxiv.org/abs/2205.14135">' in page
    assert len(pd.read_csv(folder / "figures" / "answer.csv")) == len(answers.claims.CLAIMS)
    assert (folder / "figures" / "answer.md").read_text().startswith("# Are the guides right?")
    told = cli.json("report", folder, "--images", "none")
    assert told["answer_table"][1]["verdict"] == "confirmed (predicted)"
    cli.run("paper", folder, "--json")
    assert (folder / "paper" / "tables" / "answer.tex").exists()


@pytest.mark.slow
def test_no_question_no_answer(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "sweep", None)
    cli.run("report", folder, "--images", "none", "--answer", "claims")
    assert (folder / "figures" / "answer.md").exists()
    cli.run("report", folder, "--images", "none")  # without it, the earlier one is no part of it
    assert not (folder / "figures" / "answer.md").exists()
    assert '<section id="answer"' not in (folder / "report.html").read_text()
    for content in ("{", "[]", '{"answer": 3}'):
        (folder / PLAN).write_text(content)
        assert answers.read_question(folder) is None
    (folder / PLAN).write_text('{"answer": "fit-24gb"}')  # of an earlier version
    cli.run("report", folder, "--images", "none")
    assert "no such answer" in refusal(UserError, answers.answer_question, table(*timed(0.3)), "clams")


def test_the_names_are_those_that_a_sweep_may_ask_for() -> None:
    assert answers.NAMES == runner_table.ANSWERS


@pytest.mark.slow
def test_files_of_others_beside_rows_stay(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "sweep", None)
    cli.run("report", folder, "--images", "none")
    for place in (tmp_path / "downloads", folder):
        place.mkdir(exist_ok=True)
        others = [place / name for name in ("answer.csv", "answer.md", "residuals.csv")]
        for file in others:
            file.write_text("mine")
        rows = folder if place == folder else (folder / "rows.csv").rename(place / "rows.csv")
        cli.run("report", rows, "--images", "none")
        assert [file.read_text() for file in others] == ["mine"] * 3


@pytest.mark.parametrize("answer", answers.NAMES)
def test_every_answer_can_say_that_there_is_nothing(answer: str) -> None:
    found = answers.answer_question(table(row(device="cpu", simulated_gpu=None)), answer)
    assert found is not None
    assert set(found.frame["verdict"]) == {"not tested"} and "NOT TESTED: " in found.text()
    assert found.markdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", answers.NAMES)
def test_rows_of_which_little_is_known_stop_no_answer(name: str) -> None:
    way = {"precision", "checkpointing", "optimizer", "adapter", "outcome", "device"}
    rows = [
        {name: value if name in kept else None for name, value in row(outcome=outcome, seq_len=length).items()}
        for kept in ({"outcome"}, {"outcome", "device"}, {"outcome", "device", "seq_len", "peak_allocated_bytes"},
                     way, {*way, "seq_len", "model"})
        for outcome in ("ok", "oom", "invalid")
        for length in (16, 32, 64)
    ]  # fmt: skip
    rows += [row(seq_len=length, peak_reserved_bytes=None, model="unreserved") for length in (16, 32, 64)]
    found = answers.answer_question(table(*rows), name)
    assert found is not None
    said = found.text() + found.markdown() + found.frame.to_csv()
    assert len(found.frame) and "<NA>" not in said and not re.search(r"\b(nan|inf|None)\b", said)
