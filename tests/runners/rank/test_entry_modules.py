"""A library that cannot be imported fails the trials that need it, and no others."""

from pathlib import Path

import pytest

from vramsweep.runners.rank.entry_modules import import_entries, import_entry

BROKEN = {
    "broken_symbol": "raise ImportError('undefined symbol: _ZN3c10')",
    "broken_library": "raise OSError('libcudart.so.12: cannot open shared object file')",
    "broken_setup": "raise RuntimeError('CUDA Setup failed')",
}


def test_a_broken_library_is_left_to_the_trials_that_need_it_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "sound_one.py").write_text("value = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(3):  # jobs of one process
        import_entries([*BROKEN, "absent_one", "sound_one"])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "not preloaded: broken_symbol: ImportError: undefined symbol: _ZN3c10"
    assert len(said) == len(BROKEN) + 1
    assert import_entry("sound_one").value == 3
    with pytest.raises(OSError, match="libcudart"):
        import_entry("broken_library")
