"""Reference runs: what their files may say, what is predicted of them, and what is put beside it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_readings
import pytest
import reference_runs
import validate
import validation
from conftest import ROOT, TARGETS, Cli, cases, refusal, source
from published_readings import Reading
from reference_runs import OtherTools, ReadingRequest

from vramsweep.harness.config import compose
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import complete_row
from vramsweep.harness.sweep.plan import Planned

pytestmark = pytest.mark.deterministic

HEAD = "source: someone/project a.csv@0123\ngrade: A\noverrides: [model=tiny, seq_len=16, micro_batch=1]\nruns:\n"
READING = "{quantity: allocated, value: 2, unit: MiB}"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys, validate.run)


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    return path


def test_a_run_with_all_that_it_may_say(tmp_path: Path) -> None:
    text = source("published_run.yaml")
    (one, two), mistakes = published_readings.read(file(tmp_path, text))
    assert not mistakes
    assert (one.title, one.source, one.name, one.grade, one.note, one.cannot) == (
        "project", "someone/project a.csv@0123", "one", "A", "why", "not today",
    )  # fmt: skip
    assert one.overrides == (
        "model=gpt2", "+versions.deepspeed=0.14.2", "micro_batch=4", f'runner.target="{tmp_path}/a.py:build"',
    )  # fmt: skip
    assert one.versions == {"torch": "2.10", "numpy": "2"} and two.versions == {"transformers": "4.40.0"}
    assert one.context == two.context == 3 << 29
    assert (two.grade, two.cannot, two.overrides[-1]) == ("B", None, "micro_batch=1")
    assert [(r.quantity, r.phase, r.value, r.text) for r in one.readings] == [
        ("allocated", None, 2 << 20, None), ("reserved", "forward", pytest.approx(0.2481 * 95.0396 * (1 << 30)), None),
        ("step", None, 0.25, None), ("tokens/s", None, 3500.0, None), ("outcome", None, None, "oom"),
    ]  # fmt: skip
    assert two.readings[0].value == 1e9
    assert one.place.endswith(":9") and one.readings[0].line == 14


@pytest.mark.parametrize(("run", "said"), cases("reference_run_mistakes"))
def test_a_mistake_is_named_with_its_line_and_the_others_run(tmp_path: Path, run: str, said: str) -> None:
    good = f"  - {{name: good, measured: [{READING}]}}\n"
    runs, (mistake,) = published_readings.read(file(tmp_path, f"{HEAD}  - {run}\n{good}"))
    assert [one.name for one in runs] == ["good"]
    assert said in mistake and mistake.startswith(str(tmp_path / "runs.yaml"))


@pytest.mark.parametrize(("text", "said"), cases("reference_files"))
def test_a_file_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        published_readings.read(file(tmp_path, "[" * 5000 if text == "deep" else json.loads(text)))
    assert "No such file" in refusal(UserError, published_readings.read, tmp_path / "nothing.yaml")


def test_values_are_texts_as_they_were_written_and_merge_keys_give_way_to_the_run_s_own(tmp_path: Path) -> None:
    runs = f"  - &one {{name: 2024-01-01, note: both, measured: [{READING}]}}\n  - {{<<: *one, name: two}}\n"
    text = f"source: 2024-02-31\ntitle: 1.10\ngrade: A\nruns:\n{runs}"
    (one, two), mistakes = published_readings.read(file(tmp_path, text))
    assert (one.source, one.title, one.name, mistakes) == ("2024-02-31", "1.10", "2024-01-01", [])
    assert (two.name, two.note, two.line, two.readings) == ("two", "both", 6, one.readings)


def test_the_file_s_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / 'a (copy), "b"'
    folder.mkdir()
    (folder / "a.py").touch()
    words = """["runner.target={here}/a.py:build", "data='{here}/a'", "runner.options={a: 1}"]"""
    text = f"{HEAD}  - {{name: a, overrides: {words}, measured: [{READING}]}}\n"
    (run,), _ = published_readings.read(file(folder, text))
    target, data, options = run.overrides[-3:]
    assert (data, options) == (f"data='{folder}/a'", "runner.options={a: 1}")
    (item,) = compose.resolve(["device=simulated", "runner=custom", target]).trials
    assert item.trial is not None and item.trial.runner.target == f"{folder}/a.py:build"


RUN = published_readings.Run("f", 1, "s", "t", "n", "A", (), {}, 100, None, "", ())


def row(**values: Any) -> dict[str, Any]:
    parts = {
        f"peak_{name}_bytes": 0 for name in ("parameters", "buffers", "gradients", "optimizer_state", "activations")
    }
    phases = {"load_peak_allocated_bytes": 10, "forward_peak_allocated_bytes": 80, "backward_peak_allocated_bytes": 100,
              "optimizer_peak_allocated_bytes": 70}  # fmt: skip
    return complete_row({"outcome": "ok", "peak_allocated_bytes": 100} | parts | phases | values)


def of(quantity: str, phase: str | None = None, unit: str = "bytes") -> Reading:
    return Reading(quantity, phase, 50.0, None, unit, "", 1)


def test_each_quantity_has_its_column() -> None:
    found = row(
        peak_reserved_bytes=200, peak_reserved_most_bytes=220, peak_active_bytes=110, peak_active_most_bytes=120,
        forward_peak_reserved_bytes=90, estimated_step_s=2.0, estimated_step_no_overlap_s=3.0, peak_requested_bytes=95,
    )  # fmt: skip
    asked = [of("allocated"), of("active"), of("requested"), of("reserved"), of("device"), of("allocated", "forward"),
             of("reserved", "forward"), of("step", unit="s"), of("tokens/s", unit="all")]  # fmt: skip
    told = {most: [reference_runs.predicted(one, RUN, found, most=most) for one in asked] for most in (False, True)}
    assert told[False] == [100, 110, 95, 200, 300, 80, 90, 2.0, 2.0]
    assert told[True] == [None, 120, None, 220, 320, None, None, 3.0, 3.0]
    defaults = re.findall(r"(\d+) MiB (?:where|are)", (ROOT / "benchmarks" / "published" / "README.md").read_text())
    alone = reference_runs.predicted(of("device"), replace(RUN, context=None), found, most=False)
    assert [200 + (int(size) << 20) for size in defaults] == [alone, alone]
    assert reference_runs.predicted(of("allocated"), RUN, row(outcome="oom"), most=False) is None
    assert reference_runs.predicted(of("allocated"), RUN, None, most=False) is None


def test_a_run_s_line_has_its_readings_and_errors() -> None:
    item, kinds = Planned("1", {}, None, None), (of("allocated"), of("device"), of("reserved", "forward"), of("step"))
    one = ReadingRequest(replace(RUN, name="a\x1b[2J", readings=kinds), item, replace(item, trial_id="2"))
    found = row(trial_id="2", peak_reserved_bytes=25, estimated_step_s=25.0)
    assert reference_runs.progress_text(one, found) == (
        "a\\x1b[2J without known differences: allocated 100 B predicted, 50 B published (+100.0%), device 125 B "
        "predicted, 50 B published (+150.0%), forward reserved not predicted, 50 B published, step 25 s a step "
        "predicted, 50 s a step published (-50.0%)"
    )
    assert reference_runs.progress_text(one, found | {"trial_id": "3"}) == ""
    assert reference_runs.progress_text(one, found | {"outcome": "crash"}) == ""


def test_what_moves_with_batch_and_length() -> None:
    def kind(**values: Any) -> tuple[Any, Any, Any]:
        found = reference_runs.peak_composition(row(**values))
        return found["peak_phase"], found["states_bytes"], found["moves"]

    states = {"peak_parameters_bytes": 20, "peak_gradients_bytes": 5, "peak_optimizer_state_bytes": 40}
    assert kind(**states, peak_activations_bytes=30) == ("backward", 65, True)
    assert kind(**states, peak_activations_bytes=0) == ("backward", 65, False)  # where all gradients are there
    assert kind(forward_peak_allocated_bytes=101, peak_activations_bytes=2) == ("forward", 0, True)
    assert kind(optimizer_peak_allocated_bytes=100, peak_activations_bytes=2) == ("optimizer", 0, False)
    assert kind(load_peak_allocated_bytes=300)[::2] == ("load", False)
    for unknown in (None, row(outcome="oom")):
        assert reference_runs.peak_composition(unknown)["moves"] is None


@pytest.mark.slow
def test_predictions_beside_what_was_published(tmp_path: Path, cli: Cli) -> None:
    text = source("published_runs_of_all_kinds.yaml")
    command = [file(tmp_path, HEAD + text), f"results={tmp_path}", "--json", "timeout_s=300"]
    told = cli.run(*command, status=1)
    record = json.loads(told.out)
    assert record == json.loads((tmp_path / "validation" / "readings.json").read_text())
    lines = {(line["run"], line["quantity"]): line for line in record["readings"]}
    tiny = lines["tiny", "allocated"]
    assert (tiny["measured"], tiny["outcome"], tiny["reason"], tiny["grade"]) == (1 << 20, "ok", None, "A")
    assert tiny["predicted"] > 119_360 * 4 and tiny["predicted_plain"] is None and tiny["differences"] == []
    assert tiny["states_bytes"] > 3 * 119_360 * 4 - 1
    assert lines["tiny", "tokens/s"]["measured"] == 0.5 and lines["tiny", "tokens/s"]["predicted"] > 0
    old = lines["like 4.40", "allocated"]
    assert "additive_mask" in old["differences"] and old["predicted"] != old["predicted_plain"] is not None
    for name, reason in {
        "no model": "model=nothing: there is no such model",
        "two trials": "its overrides name 2 trials; a published run must be one trial",
        "measured": "device=cpu: published runs can only be predicted",
        "compiled": "compile=default with device=simulated",
        "theirs": "closed source",
    }.items():
        line = lines[name, "outcome"]
        assert reason in line["reason"] and line["predicted"] is None
        assert line["mistake"] == (f": {name}: " in told.err) == (name != "theirs")
    assert lines["too much", "outcome"]["outcome"] == "oom"

    again = cli.run(*command, status=1)  # resumes: nothing is predicted again
    assert ["3 finished before, 0 to do" in again.err, "1 finished before, 0 to do" in again.err] == [True, True]
    assert told.err.index("] ok        tiny: allocated ") < told.err.index("like 4.40 without known differences: ")


def test_status_and_mistakes_of_the_command(tmp_path: Path, cli: Cli) -> None:
    cli.refuse()
    assert "none.yaml: No such file" in cli.refuse(tmp_path / "none.yaml")
    assert "holds no readings" in refusal(UserError, validation.load, tmp_path / "none.json")


Said = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that runs `validate FILE... --json` with these values in each row: status, record, stderr."""

    def run(*words: str, **values: Any) -> tuple[int, dict[str, Any], str]:
        def predict(asked: Any, settings: Any, folder: Path) -> tuple[dict[str, Any], int]:
            folder.mkdir(exist_ok=True)
            return {one.item.trial_id: row(**values) for one in asked if one.item is not None}, 0

        monkeypatch.setattr(reference_runs, "predict", predict)
        status = validate.run([*words, f"results={tmp_path}", "--json"])
        told = capsys.readouterr()
        return status, json.loads(told.out or "{}"), told.err

    return run


@pytest.mark.slow
def test_a_run_that_is_refused_is_named_and_makes_the_status_1(tmp_path: Path, said: Said) -> None:
    text = f"""{HEAD}  - {{name: good, measured: [{READING}]}}
  - {{name: theirs, cannot: closed source, measured: [{READING}]}}
"""
    assert said(str(file(tmp_path, text)))[0] == 0
    bad = f"""  - {{name: card, overrides: [device.gpu=gtx-9], measured: [{READING}]}}
  - {{name: divided, overrides: [sharding=zero3], measured: [{READING}]}}
  - {{name: target, overrides: [runner=custom, "runner.target={{here}}/no.py:build"], measured: [{READING}]}}
  - {{name: later, versions: {{transformers: 99.0}}, measured: [{READING}]}}
"""
    status, record, err = said(str(file(tmp_path, text + bad)))
    assert status == 1
    for line, name, reason in cases("runs_left_out"):
        (told,) = (one for one in err.splitlines() if f"left out: {tmp_path}/runs.yaml:{line}: {name}: " in one)
        assert reason in told
    assert {one["run"]: one["mistake"] for one in record["readings"]} == {
        "good": False, "theirs": False, "card": True, "divided": True, "target": True, "later": True,
    }  # fmt: skip


def test_what_ends_in_no_prediction_is_named_too(tmp_path: Path, said: Said) -> None:
    path = file(tmp_path, f"{HEAD}  - {{name: good, measured: [{READING}]}}\n")
    status, _, err = said(str(path), outcome="invalid", reason="model.path a: no config.json")
    assert status == 1 and f"left out: {path}:5: good: invalid: model.path a: no config.json" in err


def test_a_version_of_two_parts_is_text() -> None:
    run = replace(RUN, overrides=("model=tiny",), versions={"transformers": "4.50", "numpy": "2"})
    (one,), _ = reference_runs.resolve([run], [])
    assert one.item is not None and one.item.trial is not None
    assert one.item.trial.versions == {"transformers": "4.50"}


@pytest.mark.slow
def test_mistaken_words_of_the_command_are_said_once(tmp_path: Path, cli: Cli) -> None:
    runs = "".join(f"  - {{name: {n}, measured: [{READING}]}}\n" for n in range(3))
    path = str(file(tmp_path, HEAD + runs))
    for word, told in (("timeuot_s=9", "did you mean timeout_s?"), ("device.gpu=gtx-9", "there is no such GPU")):
        out, err = cli.run(path, word, status=2)
        assert err.count(told) == 1 and "planning" not in out
    custom = replace(RUN, overrides=("runner=custom",), cannot=None)
    target = f"runner.target={TARGETS}/none.py:build"  # a word that only some runners have
    (one,), _ = reference_runs.resolve([custom], [target, "timeout_s=7"])
    assert one.reason is not None and "there is no file" in one.reason


@pytest.mark.slow
def test_a_mistake_of_several_runs_is_said_once(tmp_path: Path, said: Said) -> None:
    bad = "".join(f"  - {{name: b{n}, overrides: [model=nothing], measured: [{READING}]}}\n" for n in range(3))
    path = file(tmp_path, f"{HEAD}  - {{name: good, measured: [{READING}]}}\n{bad}")
    status, record, err = said(str(path))
    assert status == 1 and err.count("there is no such model") == 1 and f"{path}:6: b0 and 2 more: model=nothing" in err
    assert len(record["mistakes"]) == 1


def test_where_nothing_can_be_predicted_every_mistake_is_said(tmp_path: Path, cli: Cli) -> None:
    runs = f"  - {{name: theirs, cannot: closed, measured: [{READING}]}}\n  - {{name: x, measured: []}}\n"
    told = cli.refuse(file(tmp_path, HEAD + runs))
    assert ":6: measured is missing" in told and ":5: theirs: closed" in told


def test_a_file_named_twice_is_read_once(tmp_path: Path, said: Said) -> None:
    path = file(tmp_path, f"{HEAD}  - {{name: good, measured: [{READING}]}}\n")
    (tmp_path / "link.yaml").symlink_to(path)
    status, record, err = said(str(path), str(tmp_path / "link.yaml"))
    assert status == 0 and len(record["readings"]) == 1 and "link.yaml is named twice; it is read once" in err


def test_planning_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    reference_runs.resolve([replace(RUN, name=str(n), cannot="closed") for n in range(120)], [])
    said = capsys.readouterr().out.splitlines()
    assert said == [f"planning: {n} of 120 runs" for n in (0, 50, 100)]


def test_every_reading_without_a_prediction_says_why() -> None:
    kinds = [of("allocated"), of("reserved"), of("device"), of("reserved", "forward"), of("step", unit="s")]
    run = replace(RUN, readings=tuple(kinds))
    item = Planned("1", {}, None, None)

    def found(**values: Any) -> list[tuple[Any, Any]]:
        return [
            (one["predicted"], one["reason"])
            for one in reference_runs.lines(ReadingRequest(run, item), {"1": row(**values)})
        ]

    full = "predicted to run out of memory: without a limit it would reserve 3.0 GiB"
    assert found(outcome="oom", unlimited_peak_reserved_bytes=3 << 30) == [
        (None, full), (3 << 30, None), ((3 << 30) + 100, None), (None, full), (None, full),
    ]  # fmt: skip
    assert {why for _, why in found(outcome="host_oom")} == {"predicted to run out of the host's memory"}
    paged = "no estimated times, because they depend on where the pages of paged_adamw_8bit are"
    known = found(peak_reserved_bytes=5, notes=["other", paged])
    assert known[:3] == [(100, None), (5, None), (105, None)]
    assert known[3:] == [(None, "no forward_peak_reserved_bytes is predicted"), (None, paged)]
    assert found()[-1] == (None, "no estimated times")


def test_what_other_tools_said_is_read_beside_the_runs(tmp_path: Path) -> None:
    published = ROOT / "benchmarks" / "published" / "forum-gpt2.yaml"
    runs, _ = published_readings.read(published)
    estimates = OtherTools.beside([published, published, tmp_path / "mine.yaml"])
    known = [said for run in runs if (said := estimates.of(run)) is not None]
    assert known and all(set(said) <= set(estimates.sources) for said in known)
    assert estimates.of(RUN) is None and OtherTools.beside([tmp_path / "mine.yaml"]).sources == {}
    for text in ("[", "7", '{"runs": {"a": {"b": {"tool": "x"}}}}', '{"runs": {}, "else": 1}'):
        (tmp_path / "other-tools.json").write_text(text)
        assert "other-tools.json has no estimates" in refusal(UserError, OtherTools.beside, [tmp_path / "mine.yaml"])


@pytest.mark.slow
def test_every_file_of_ours_can_be_read() -> None:
    files = sorted((ROOT / "benchmarks" / "published").glob("*.yaml"))
    found = [published_readings.read(path) for path in files]
    assert [mistakes for _, mistakes in found if mistakes] == []


def test_a_wrong_reading_leaves_the_others_and_a_mistaken_run_names_its_readings_mistakes_too(tmp_path: Path) -> None:
    readings = "[{quantity: allocated, value: 010, unit: GB}, {quantity: step, value: 1, unit: min}]"
    bad = "  - {name: bad, grade: C, measured: [{quantity: allocated, value: -1, unit: GB}]}\n"
    (run,), mistakes = published_readings.read(file(tmp_path, f"{HEAD}  - {{name: good, measured: {readings}}}\n{bad}"))
    assert [(one.quantity, one.value) for one in run.readings] == [("allocated", 10e9)]
    assert len(mistakes) == 3 and "runs.yaml:5: unit min: there is no such unit of step" in mistakes[0]
    assert "value -1" in mistakes[1] and "grade C" in mistakes[2]
