"""The promises of benchmarks/fuzz.py with few inputs, made by hypothesis: what reads data from outside raises what it
says, and nothing else. Examples are stated; docs/checks.md has the counts of the long form."""

import importlib
import json
import pickle
from typing import Any

import fuzz
import fuzz_seeds
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramsweep.harness.allocator import recording, replay, safe_unpickle
from vramsweep.harness.allocator.config import OPTIONS, AllocatorConfigError, parse
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal, migrations
from vramsweep.harness.rows.schema import BY_NAME, is_plausible
from vramsweep.harness.sweep import publication_check as check

NO_DEADLINE: dict[str, Any] = {
    "deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]
}  # fmt: skip
PICKLES, LINES = list(fuzz_seeds.pickles()), list(fuzz_seeds.lines())
VALID = [pickle.dumps(one) for one in fuzz_seeds.recordings()]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def edited(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    """With other bytes at some places."""
    changed = bytearray(data)
    for at, value in edits:
        changed[at % len(changed)] = value
    return bytes(changed)


def test_the_modules_that_the_long_form_watches_exist() -> None:
    for target in fuzz.TARGETS.values():
        for module in target.modules:
            importlib.import_module(module)


OPERANDS = ("seq_len", "micro_batch", "kept", "max", "min", "1", "0", "64", "lambda:")
EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8)


@settings(max_examples=500, **NO_DEADLINE)
@given(st.sampled_from(PICKLES), EDITS)
def test_bytes_are_a_recording_or_a_user_error(data: bytes, edits: list[tuple[int, int]]) -> None:
    try:
        recording.check(safe_unpickle.loads(edited(data, edits), "fuzzed"), "fuzzed")
    except UserError as error:
        assert len(str(error)) < 1000 and str(error).count("\n") <= 1


@settings(max_examples=200, **NO_DEADLINE)
@given(st.binary(max_size=17))
def test_a_recording_with_changed_values_replays_or_is_a_user_error(data: bytes) -> None:
    try:
        known = recording.check(fuzz_seeds.changed(VALID, data), "fuzzed")
        start = undo(known)
        replay.replay_as_recorded(known, start)
        replay.replay_under(known, start, parse("expandable_segments:True"), 1 << 26)
    except UserError as error:
        assert len(str(error)) < 1000


@pytest.mark.slow
@settings(max_examples=500, **NO_DEADLINE)
@given(
    st.lists(
        st.sampled_from([*(o.name for o in OPTIONS), *":,[]> ", "True", "8", "1e400", "nan", "-1", "٣"])
        | st.text(max_size=4)
    )
)
def test_a_text_of_settings_says_the_same_again_or_is_refused(words: list[str]) -> None:
    try:
        found = parse("".join(words))
    except AllocatorConfigError:
        return
    assert parse(found.render()) == found


@settings(max_examples=500, **NO_DEADLINE)
@given(st.sampled_from(LINES), EDITS)
def test_a_line_is_a_row_or_none(line: bytes, edits: list[tuple[int, int]]) -> None:
    row = journal.parsed(edited(line, edits))
    assert row is None or is_plausible(row)


@pytest.mark.slow
@settings(max_examples=300, **NO_DEADLINE)
@given(
    st.dictionaries(
        st.sampled_from([*BY_NAME, "zero_stage", "gradient_checkpointing", "optimizer"]), ANYTHING, max_size=8
    ),
    st.none()
    | st.dictionaries(st.sampled_from(["runner", "device", "protocol", "optimizer", "fingerprints"]), ANYTHING),
)
def test_a_row_of_anything_is_none_or_can_be_asked_about(values: dict[str, Any], trial: dict[str, Any] | None) -> None:
    """Its id fits its trial, so that what was measured by version 1 is looked at."""
    known = {"schema_version": 1, "outcome": "ok", "terminal": True, "trial": trial}
    row = journal.parsed(json.dumps(values | known | {"trial_id": migrations.first_id(trial or {})}).encode())
    assert row is None or is_plausible(row)
    if row is not None:
        check.findings([row], None)


@settings(max_examples=500, **NO_DEADLINE)
@given(
    st.lists(st.sampled_from([*OPERANDS, *"+-*%(),.[]'", "//", "not ", " and ", " or ", "==", "<=", "**"]), max_size=14)
)
def test_a_text_is_a_formula_or_a_value_error(words: list[str]) -> None:
    pytest.importorskip("torch")
    from vramsweep.runners.trace import symbolic_trace

    try:
        found = symbolic_trace.compiled("".join(words))(symbolic_trace.Point(24, 3))
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert type(found) is int
