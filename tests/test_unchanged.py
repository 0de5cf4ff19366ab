"""Kept results: what counts as a change, what is left out, and that a failure is never kept."""

import json
from pathlib import Path

import pytest
import unchanged
from conftest import ROOT, literal_cases, source

pytest_plugins = ["pytester"]
TRACING = ROOT / "tests" / "runners" / "trace" / "test_step_tracer.py"


def test_comments_and_docstrings_are_no_change_and_code_is(tmp_path: Path) -> None:
    texts = (
        '"""A."""\n\ndef f() -> int:\n    """One."""\n    return 1\n',
        "# another comment\ndef f() -> int:\n    return (1)\n",
        "def f() -> int:\n    return 2\n",
    )
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
    first, commented, other = (unchanged.hash_file(tmp_path / f"{number}.py") for number in range(3))
    assert first == commented != other


CHANGES = {name: (tracing, fits) for name, tracing, fits in literal_cases("inputs_of_tests")}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_test_depends_on_is_its_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, data and programs, whoever reads them, and no more of the tests than what is imported."""
    tests = (TRACING, ROOT / "tests/analysis/model/test_fit.py")

    def hashes() -> list[str]:
        for cached in (unchanged.hash_inputs, unchanged.hash_folders):
            cached.cache_clear()
        return [unchanged.hash_inputs(path) for path in tests]

    real, before = unchanged.hash_file, hashes()
    monkeypatch.setattr(unchanged, "hash_file", lambda path: "other" if path == ROOT / name else real(path))
    after = hashes()
    monkeypatch.undo()
    assert (before[0] != after[0], before[1] != after[1]) == CHANGES[name]
    assert hashes() == before


def test_screens_count_for_the_tests_that_compare_them() -> None:
    assert unchanged.reaches_screens(ROOT / "tests" / "test_screens.py") and not unchanged.reaches_screens(TRACING)


def test_public_data_count_for_those_who_read_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results are the same beside a checkout that has none."""
    fits = ROOT / "tests/analysis/model/test_fit.py"  # by benchmarks/fit_cover.py
    found = []
    for place in ("../shared/data", str(tmp_path)):
        (tmp_path / "more.csv").write_text("1")
        monkeypatch.setattr(unchanged, "SHARED", place)
        found.append([unchanged.hash_inputs.__wrapped__(path) for path in (TRACING, fits)])
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_what_passed_is_left_out_until_its_inputs_change_or_it_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow deterministic tests, of which one fails and one has a path in its name; a slow test and a quick one."""
    monkeypatch.setattr(unchanged, "ROOT", pytester.path)
    monkeypatch.setattr(unchanged, "KEPT", pytester.path / "passed.json")
    for name in ("hash_folders", "hash_machine"):
        monkeypatch.setattr(unchanged, name, lambda *names: "")
    (pytester.path / "tests").mkdir()
    code = source("tests_to_leave_out.txt")
    (pytester.path / "tests" / "conftest.py").write_text(
        "import unchanged\nfrom unchanged import pytest_addoption, pytest_configure\n"
        "def pytest_runtest_setup(item): unchanged.note_kept(item)\n"
    )
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers =\n    slow: s\n    deterministic: d\n")
    path = pytester.makepyfile(code).rename(pytester.path / "tests" / "test_it.py")

    def run(how: str) -> tuple[int, int, int]:
        for cached in (unchanged.hash_file, unchanged.hash_inputs, unchanged.helpers, unchanged._imported):
            cached.cache_clear()
        counts = pytester.inline_run(f"--unchanged={how}", "-p", "no:cacheprovider").countoutcomes()
        return counts[0], counts[1], counts[2]

    assert run("skip") == (4, 0, 1)
    ((results,),) = [list(found.values()) for found in json.loads((pytester.path / "passed.json").read_text()).values()]
    assert results == ["test_traced[True]"]
    assert run("skip") == (3, 0, 1)
    assert run("run") == run("keep") == (4, 0, 1)
    monkeypatch.setenv("FAILS", "1")
    assert run("keep") == (3, 0, 2)  # what was kept and fails is forgotten
    monkeypatch.delenv("FAILS")
    assert run("skip") == (4, 0, 1)
    assert run("skip") == (3, 0, 1)
    path.write_text(path.read_text().replace("assert right", "assert right is True"))
    assert run("skip") == (4, 0, 1)
