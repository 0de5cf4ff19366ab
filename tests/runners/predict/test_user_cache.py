"""Traces that are kept for a user: which, where, how many, and that they change nothing."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import ROOT, Run, merged, parametrized, tiny
from traces import SIMULATED

from vramsweep.harness.files.file_names import CACHE
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import trace_cache

DIFFERENT = {"started_at", "duration_s", "host_load", "overhead_s"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which traces are kept."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


def trial(**over: Any) -> Trial:
    return trial_parser.parse(tiny(device=SIMULATED, **over))


def place(name: str) -> Path:
    found = trace_cache.place_of(name)
    assert found is not None
    return found


def test_it_is_the_users_alone(kept: Path) -> None:
    trace_cache.keep(place("a"), b"x")
    assert trace_cache.load(place("a")) == b"x" and not place("b").exists()
    [file] = kept.iterdir()
    assert (kept.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    kept.chmod(0o770)  # others could have written it
    assert trace_cache.place_of("a") is None


def test_links_are_not_followed(kept: Path, tmp_path: Path) -> None:
    trace_cache.keep(place("a"), b"x")
    [file] = kept.iterdir()
    (tmp_path / "theirs").write_bytes(b"y")
    file.unlink()
    file.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        trace_cache.load(file)
    trace_cache.keep(file, b"x")
    assert (tmp_path / "theirs").read_bytes() == b"y"
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    assert trace_cache.place_of("a") is None


def test_what_was_not_used_for_longest_makes_room(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MOST_KEPT", 25)
    for age, name in enumerate("ab"):
        trace_cache.keep(place(name), b"x" * 10)
        os.utime(place(name), (age, age))
    trace_cache.load(place("a"))  # which uses it
    trace_cache.keep(place("c"), b"x" * 10)
    assert [place(name).exists() for name in "abc"] == [True, False, True]


def test_it_is_read_where_nothing_can_be_written(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is mounted read-only, a full disk."""
    trace_cache.keep(place("a"), b"x")
    refuse = mock.Mock(side_effect=OSError(errno.EROFS, "read-only"))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert trace_cache.load(place("a")) == b"x"
    trace_cache.keep(place("b"), b"y")
    assert refuse.call_count == 2 and [file.read_text() for file in kept.iterdir()] == ["x"]


def test_what_another_process_removes_meanwhile_stops_nobody(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MOST_KEPT", 15)
    for age, name in enumerate("ab"):
        trace_cache.keep(place(name), b"x" * 7)
        os.utime(place(name), (age, age))
    gone = mock.Mock(path=str(kept / "gone"), stat=mock.Mock(side_effect=FileNotFoundError))
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: [gone, *scan(folder)])
    trace_cache.keep(place("c"), b"x" * 7)
    assert [place(name).exists() for name in "abc"] == [False, True, True]


@parametrized("trials_of_files_of_the_user")
def test_what_depends_on_the_users_own_files_is_not_kept(over: dict[str, Any], kept: Path) -> None:
    assert trace_cache.users_file("a", trial()) == trace_cache.place_of("a")
    assert trace_cache.users_file("a", Trial.model_validate(merged(trial().model_dump(mode="json"), over))) is None


def test_another_code_or_environment_is_another_file(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {trace_cache.place_of("a")}
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    places.add(trace_cache.place_of("a"))
    monkeypatch.setattr(trace_cache, "_installed_state", lambda: "changed")
    places.add(trace_cache.place_of("a"))
    assert len(places) == 3 and None not in places
    monkeypatch.setattr(trace_cache, "_installed_state", lambda: None)
    assert trace_cache.place_of("a") is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    assert trace_cache.place_of("a") is None
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert trace_cache.place_of("a") is None


def test_a_kept_trace_that_is_not_as_it_was_written_is_made_anew(kept: Path, tmp_path: Path) -> None:
    asked = trial()
    key = trace_cache.trace_key(asked, asked.device.card)
    trace_cache.keep(place(key), b'{"trace": {}}\n00000000\n')
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
    assert not (tmp_path / "t" / "trials" / "traces").exists()  # nothing was traced
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
