"""Traces that are kept for a user: which, where, how many, and that they change nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run, tiny
from traces import SIMULATED

from vramsweep.harness.files.file_names import CACHE
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import trace_cache, user_cache

DIFFERENT = {"started_at", "duration_s", "host_load", "overhead_s"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which traces are kept."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


def trial(**over: Any) -> Trial:
    return trial_parser.parse(tiny(device=SIMULATED, **over))


def test_it_is_the_users_alone(kept: Path) -> None:
    user_cache.keep("a", trial(), b"x")
    assert user_cache.load("a", trial()) == b"x" and user_cache.load("b", trial()) is None
    [file] = kept.iterdir()
    assert (kept.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    kept.chmod(0o770)  # others could have written it
    assert user_cache.load("a", trial()) is None


def test_links_are_not_followed(kept: Path, tmp_path: Path) -> None:
    user_cache.keep("a", trial(), b"x")
    [file] = kept.iterdir()
    (tmp_path / "theirs").write_bytes(b"y")
    file.unlink()
    file.symlink_to(tmp_path / "theirs")
    assert user_cache.load("a", trial()) is None
    user_cache.keep("a", trial(), b"x")
    assert (tmp_path / "theirs").read_bytes() == b"y"
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    assert user_cache.load("a", trial()) is None


def test_what_was_not_used_for_longest_makes_room(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_cache, "MOST", 25)
    for age, name in enumerate("ab"):
        user_cache.keep(name, trial(), b"x" * 10)
        place = user_cache.place_of(name, trial())
        assert place is not None
        os.utime(place, (age, age))
    assert user_cache.load("a", trial()) is not None  # which uses it
    user_cache.keep("c", trial(), b"x" * 10)
    assert [user_cache.load(name, trial()) is None for name in "abc"] == [False, True, False]


@pytest.mark.parametrize(
    "over",
    [
        {"runner": {"name": "custom", "target": f"{ROOT}/tests/targets/good.py:train"}},
        {"model": tiny()["model"] | {"path": "somebody/model"}},
        {"model": tiny()["model"] | {"path": "somebody/model", "trust_remote_code": True}},
        {"ds_config": "ds.json"},
        {"data": "lengths:mine.txt"},
    ],
)
def test_what_depends_on_the_users_own_files_is_not_kept(over: dict[str, Any], kept: Path) -> None:
    assert user_cache.place_of("a", Trial.model_validate(trial().model_dump(mode="json") | over)) is None


def test_another_code_or_environment_is_another_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {user_cache.place_of("a", trial())}
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    places.add(user_cache.place_of("a", trial()))
    monkeypatch.setattr(user_cache, "_installed_state", lambda: "changed")
    places.add(user_cache.place_of("a", trial()))
    assert len(places) == 3 and None not in places
    monkeypatch.setattr(user_cache, "_installed_state", lambda: None)
    assert user_cache.place_of("a", trial()) is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    assert user_cache.place_of("a", trial()) is None
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert user_cache.place_of("a", trial()) is None


def test_a_kept_trace_that_is_not_as_it_was_written_is_made_anew(kept: Path, tmp_path: Path) -> None:
    asked = trial()
    key = trace_cache.trace_key(asked, asked.device.card)
    user_cache.keep(key, asked, b'{"trace": {}}\n00000000\n')
    assert trace_cache.load_trace(asked, asked.device.card, tmp_path) is None and not list(kept.iterdir())


@pytest.mark.slow
@pytest.mark.deterministic
def test_rows_of_kept_traces_are_the_same(kept: Path, run_sweep: Run, tmp_path: Path) -> None:
    """Few lengths, and many, which a symbolic trace knows."""
    lengths = [*range(8, 40), 64]
    wanted = [tiny(device=SIMULATED, seq_len=n) for n in lengths] + [tiny(device=SIMULATED, grad_accum=2)]
    first, count = run_sweep(*wanted), len(list(kept.iterdir()))
    assert count >= 3
    shutil.rmtree(tmp_path / "t")
    again = run_sweep(*wanted)
    assert not (tmp_path / "t" / "traces").exists()  # nothing was traced
    assert len(list(kept.iterdir())) == count
    for one, other in zip(first, again, strict=True):
        assert {k: v for k, v in one.items() if k not in DIFFERENT} == {
            k: v for k, v in other.items() if k not in DIFFERENT
        }


def test_reading_a_trace_needs_no_torch() -> None:
    code = (
        "import sys; from vramsweep.runners.worker import worker, batch_server, largest_server, query_server; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
