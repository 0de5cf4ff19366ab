"""The screens are as they were looked at: `python tests/screens.py --write` makes them anew."""

from pathlib import Path

import pytest
import screens

pytestmark = [pytest.mark.slow, pytest.mark.deterministic]


@pytest.mark.parametrize("name", list(screens.SCREENS))
def test_the_screen_is_the_one_that_was_looked_at(name: str, tmp_path: Path) -> None:
    assert screens.capture_screen(name, tmp_path) == (screens.FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_of_a_screen_and_fits_its_columns() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in screens.FOLDER.iterdir()}
    assert set(files) == set(screens.SCREENS)
    shown = [line for text in files.values() for line in text.splitlines() if line[:2] not in ("$ ", "  ")]
    assert max(map(len, shown)) <= 180
