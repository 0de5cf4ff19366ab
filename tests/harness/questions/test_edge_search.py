"""`sweep=frontier`: the edge of each configuration, round by round, its table, and what it makes of failures."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, Cli, cases, refusal, tiny
from launchers import FINE, Fake, error

from vramsweep import __main__ as front_door
from vramsweep.analysis.data.load import load
from vramsweep.analysis.model import memory_frontier as of_rows
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.worker_files import ANSWER
from vramsweep.harness.questions import edge_search, largest_prediction
from vramsweep.harness.questions.edge_search import Search, SearchPlan
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.search.axis_search import Edge, Probe
from vramsweep.harness.sweep import session
from vramsweep.harness.sweep.plan import Settings

pytestmark = pytest.mark.deterministic

LENGTHS = "seq_len=range(64,4097,64)"  # 64 of them
PREDICTED: dict[str, Any] = {
    "largest": 1024, "all_up_to": 1024, "looked_at": 9, "unanswered": 0, "of": 64, "margin": 0.0157, "complete": True,
    "trace_basis": "symbolic", "reason": None,
}  # fmt: skip


class Memory(Fake):
    """The launcher of a command: memory for `room` tokens; predictions say `predicted`, trials at `broken` crash."""

    room, predicted, broken, made = 1024, 1024, -1, list["Memory"]()

    def __init__(self, *_: Any) -> None:
        super().__init__(self.room)
        self.asked = 0
        self.made.append(self)

    def answer(self, spec: Any, folder: Path, environ: Any, look: Any) -> Evidence:
        if "axis" in spec:
            self.asked += 1
            folder.mkdir(parents=True)
            answer = PREDICTED | {"largest": self.predicted or None, "all_up_to": self.predicted or None}
            (folder / ANSWER).write_text(json.dumps({one["trial_id"]: answer for one in spec["trials"]}))
            return FINE
        found = super().answer(spec, folder, environ, look)
        return found if spec["trial"]["seq_len"] != self.broken else error("ValueError", "no such thing")


Command = Callable[..., tuple[int, list[dict[str, Any]], list[tuple[int, int]]]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the verb; the exit status, the edges, and the lengths and batches that were tried."""
    monkeypatch.setattr(session, "Launcher", Memory)
    monkeypatch.setattr(Memory, "made", [])

    def run(*words: str, **of_memory: int) -> tuple[int, list[dict[str, Any]], list[tuple[int, int]]]:
        for name, value in of_memory.items():
            monkeypatch.setattr(Memory, name, value)
        own = ["model=tiny", "device=cpu", "protocol=brief", f"results={tmp_path}", "report=false", "name=edge"]
        own += ["retries=0", "precision=fp32", "--json"]
        status = front_door.main(["sweep", "-m", "sweep=frontier", *own, *words])
        lines = capsys.readouterr().out.splitlines()
        edges = json.loads(lines[-1]) if lines and lines[-1].startswith("[{") else []
        return status, edges, Memory.made[-1].tried

    return run


@pytest.mark.slow
def test_a_right_prediction_takes_two_trials_and_the_same_command_none(command: Command, tmp_path: Path) -> None:
    status, (edge,), tried = command(LENGTHS, "predict=l4-24gb")
    assert status == 0 and tried == [(1024, 1), (1088, 1)]
    assert (edge["largest"], edge["smallest"], edge["predicted"], edge["trials"]) == (1024, 1088, 1024, 2)
    assert edge["confirmed"] and edge["bound"]["kind"] == "full"
    rows, _ = journal.read(tmp_path / "edge")
    assert edge["trial_ids"] == [row["trial_id"] for row in rows]
    assert all(row["terminal"] for row in rows)
    status, again, tried = command(LENGTHS, "predict=l4-24gb")
    assert status == 0 and again == [edge] and tried == []
    assert len(journal.read(tmp_path / "edge")[0]) == 2


@pytest.mark.slow
def test_configurations_are_searched_side_by_side_and_one_axis_is_the_edge(command: Command) -> None:
    status, edges, tried = command(LENGTHS, "micro_batch=1,2", "precision=fp32,bf16", "predict=l4-24gb")
    found = {edge["configuration"].partition(" · batch ")[2]: edge for edge in edges}
    ends = {"1 · fp32": 1024, "1 · bf16": 1024, "2 · fp32": 512, "2 · bf16": 512}
    assert status == 0 and {name.removesuffix(" · default"): edge["largest"] for name, edge in found.items()} == ends
    assert all(edge["trials"] == 2 if edge["largest"] == 1024 else edge["trials"] <= 9 for edge in edges)
    assert tried[:4].count((1024, 1)) == 2 and tried[:4].count((1024, 2)) == 2  # the first round
    assert Memory.made[-1].asked == 1  # one attempt predicts all
    status, edges, tried = command("seq_len=128,256", "micro_batch=range(1,33)", "name=batch")
    assert status == 0 and [(edge["largest"], edge["smallest"]) for edge in edges] == [(8, 9), (4, 5)]
    assert all(edge["trials"] <= 6 and edge["predicted"] is None for edge in edges)  # log2(32) + 1


@pytest.mark.slow
def test_what_ends_a_search_is_told(command: Command) -> None:
    status, (edge,), tried = command(LENGTHS, "predict=l4-24gb", broken=1088)
    assert status == 1 and tried == [(1024, 1), (1088, 1)] and not edge["confirmed"]
    assert (edge["largest"], edge["smallest"]) == (1024, None)
    assert edge["unknown"] == "crash: ValueError: no such thing; retry_failed=true runs it again"
    status, (edge,), tried = command(LENGTHS, "predict=l4-24gb", "retry_failed=true", broken=-1)
    assert status == 0 and edge["confirmed"] and tried == [(1088, 1)]
    status, (edge,), _ = command("seq_len=range(64,8193,64)", "name=positions", room=10**6)
    assert status == 0 and (edge["largest"], edge["smallest"]) == (4096, 4160)
    assert edge["bound"] == {
        "kind": "beyond",
        "reason": "seq_len 4160 is longer than tiny's 4096 positions; take a model with more",
    }
    status, (edge,), _ = command("seq_len=64,128", "name=short")
    assert status == 0 and (edge["largest"], edge["smallest"], edge["bound"]) == (128, None, None)
    status, (edge,), _ = command("seq_len=64,128", "name=none", room=1)
    assert status == 0 and (edge["largest"], edge["smallest"], edge["confirmed"]) == (None, 64, True)


@pytest.mark.slow
def test_what_cannot_run_at_all_is_one_row(command: Command, tmp_path: Path) -> None:
    status, edges, _ = command(LENGTHS, "sharding=none,zero3")
    assert status == 0 and len(edges) == 2
    (refused,) = [edge for edge in edges if edge["bound"]["kind"] == "beyond"]
    assert refused["largest"] is None and refused["trials"] == 0 and "sharding" in refused["bound"]["reason"]
    rows, _ = journal.read(tmp_path / "edge")
    assert [row["outcome"] for row in rows].count("invalid") == 1


@pytest.mark.slow
def test_a_dominated_configuration_is_not_run_and_its_bound_is_called_inferred(command: Command) -> None:
    words = ("seq_len=512,1024,2048", "micro_batch=1,2", "edge_of=seq_len", "skip_dominated=true", "predict=l4-24gb")
    status, edges, tried = command(*words, predicted=2048)
    assert status == 0 and (2048, 1) in tried and (2048, 2) not in tried
    (one, two) = edges
    assert one["confirmed"] and (one["largest"], one["smallest"]) == (1024, 2048)
    assert (two["largest"], two["smallest"], two["confirmed"]) == (512, 1024, True)
    assert two["trials"] == 2


@pytest.mark.parametrize(("typed", "said"), cases("frontier_mistakes"))
def test_mistakes(typed: str, said: str, here: Path, cli: Cli) -> None:
    own = ["model=tiny", "device=cpu", "report=false", "name=edge", "precision=fp32"]
    told = cli.refuse("sweep", "-m", "sweep=frontier", *own, *typed.split())
    assert said in told and told.count("\n") == 1


@pytest.mark.slow
def test_a_plan_lists_the_first_round_and_how_many_may_follow(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["model=tiny", "device=cpu", "micro_batch=1,2", "predict=false", f"results={tmp_path}"]  # LENGTHS and more
    assert front_door.main(["plan", "-m", "sweep=frontier", *words]) == 0
    told = capsys.readouterr().out
    assert "seq 2048" in told and "1, 2" in told and "2 to do" in told  # 4,160 are more than tiny's positions
    assert "the largest seq_len of 2 configurations: up to 14 trials, chosen as results come" in told
    assert not list(tmp_path.iterdir()) or not list(tmp_path.rglob("journal*"))


def ended(*known: tuple[int, Probe], **of_ahead: Any) -> Search:
    one = Search(SearchPlan(**({"label": "tiny", "values": range(10, 60, 10)} | of_ahead)))
    one.bisection.tell(dict(known))
    return one


def test_the_table_tells_measured_from_inferred_and_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    fits, full = Probe("fits"), Probe("full", "no room")
    searches = [
        ended((20, fits), (30, full), label="measured", predicted=20, every=20),
        ended((20, fits), (30, Probe("inferred", "not run, as abc is full")), label="inferred", predicted=20, every=10),
        ended((20, fits), (30, Probe("failed", "timeout: 600 s")), predicted=20, every=20, label="failed"),
        ended((10, full), (20, fits), (30, full), label="torn", remark="predict=false"),
        ended((50, fits), predicted=50, every=50, label="all"),
        ended((10, Probe("beyond", "no card")), label="refused", values=[10], remark="no card"),
    ]
    assert edge_search.show(searches, "seq_len", as_json=False) == 1
    told = capsys.readouterr().out
    cells = [re.split(r"\s{2,}", line.strip()) for line in told.splitlines()]
    lines = {first: rest for first, *rest in cells if rest}
    assert lines["measured"] == ["20", "30", "2", "20", "yes"]
    assert lines["inferred"] == ["20", "30 (not run)", "1", "20 (all up to 10)", "no"]
    assert lines["failed"] == ["20", "unknown", "2", "20", "no"]
    assert lines["torn"] == ["20", "30", "3", "unknown", "no"]
    assert lines["all"] == ["50", "unknown", "1", "50", "no"]
    assert lines["refused"] == ["unknown", "10 (cannot run)", "0", "unknown", "no"]
    assert "inferred: not run, as abc is full" in told and "failed: the search stopped: timeout: 600 s" in told
    assert "torn: results from 10 to 20 contradict each other: 10 did not fit, 20 did" in told
    assert "torn: no maximum was predicted: predict=false" in told and "refused: no card" in told
    assert "all: all values of the range fit, up to 50; larger ones may fit too" in told
    assert edge_search.show(searches[:2], "seq_len", as_json=True) == 0
    none = Search(SearchPlan("x", [5], "no positions"))
    assert none.found() == Edge(None, 5, Probe("beyond", "no positions")) and not none.ask()


def test_what_is_predicted_and_how_far_beside_it_the_search_strides_first() -> None:
    before = SearchPlan("x", range(1, 8193))
    assert edge_search.predicted(before, PREDICTED, 0.01) == replace(before, predicted=1024, every=1024, margin=10)
    assert edge_search.predicted(before, PREDICTED, 0.0).margin == 1
    assert edge_search.predicted(SearchPlan("x", range(64, 8193, 64)), PREDICTED, 0.01).margin == 1
    none = PREDICTED | {"largest": None, "all_up_to": None}
    assert edge_search.predicted(before, none, 0.01).predicted == 0
    unknown = edge_search.predicted(before, none | {"looked_at": 0, "unanswered": 3}, 0.01)
    assert unknown.predicted is None and unknown.remark == "no value could be traced"
    refused = edge_search.predicted(before, largest_prediction.NO_ANSWER | {"reason": "a command has no edge"}, 0.01)
    assert refused.predicted is None and refused.remark == "a command has no edge"


def test_a_card_that_is_not_listed_and_a_cpu_have_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])

    def remark(predict: Any, **over: Any) -> str | None:
        settings = Settings(**(SETTINGS | {"predict": predict}))
        return edge_search.plan_search([tiny(**over)], settings, "seq_len", [64, 128], tmp_path, None)[0].remark

    assert remark(True) == "device=cpu is not a GPU; predict=GPU predicts for one"
    assert remark(False) == "predict=false" and remark("l4-24gb") is None
    assert remark(True, device={"name": "simulated", "gpu": "l4-24gb"}) is None
    assert remark(True, device={"name": "cuda"}) == "no GPU is visible here; predict=GPU predicts for one"
    assert remark("l4-24gb", device={"name": "cuda"}) is None
    assert "predict=t5 (true, false or a GPU): there is no such GPU" in refusal(UserError, remark, "t5")


@pytest.mark.slow
def test_a_search_of_two_sides_is_an_edge_for_the_report_too(command: Command, tmp_path: Path) -> None:
    """Rows are all that it reads, whoever asked for their trials; a CPU's say nothing of a card."""
    command(LENGTHS, "predict=l4-24gb")
    rows, _ = journal.read(tmp_path / "edge")
    on_card = {"device": "cuda", "gpu_name": "NVIDIA L4", "device_total_bytes": 24 << 30}
    with journal.Journal(tmp_path / "cuda") as book:
        for row in rows:
            ok = {"peak_reserved_bytes": 20 << 30} if row["outcome"] == "ok" else {}
            book.append(row | on_card | ok)
    (limit,) = of_rows.frontier(load(tmp_path / "cuda"), [24.0])
    assert (limit.largest_ok, limit.smallest_too_large) == (1024, 1088)
