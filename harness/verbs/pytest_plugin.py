"""The pytest fixture `predicted`, for memory regression tests without a GPU in anybody's CI.

def test_fits_a_24_gb_card(predicted):
    rows = predicted("model=gpt2", "seq_len=512,1024", "micro_batch=8", "gpu=rtx4090-24gb")
    assert all(row["outcome"] == "ok" for row in rows)

def test_takes_no_more_than_it_did(predicted):
    predicted("runner=custom", "runner.target=train.py:build", "micro_batch=4", max_reserved="6.2GiB")
"""

import subprocess
from pathlib import Path
from typing import Protocol

import pytest

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.rows.journal import read, terminal
from vramsweep.harness.rows.schema import Row


class Predicted(Protocol):
    """The type of the fixture, for tests with type hints."""

    def __call__(self, *words: str, max_reserved: str | None = None) -> list[Row]:
        """Return the rows of the trials that these words name, sizes in bytes. Raises UserError."""


@pytest.fixture
def predicted(tmp_path: Path) -> Predicted:
    """Return `predicted(*words, max_reserved=None)`, which returns the rows of `vramsweep predict` with these words.

    With `max_reserved`, a size with its unit as "22GiB" or "25165824B", the test fails if a row reserves more. Rows
    that run out of GPU memory have the bytes they would reserve in `unlimited_peak_reserved_bytes`. The call raises
    UserError for words that cannot be predicted, or that make no row (--largest), so that no test passes without one.
    """

    def predict(*words: str, max_reserved: str | None = None) -> list[Row]:
        if any(word.startswith("--largest") for word in words):
            raise UserError("predicted returns rows, and --largest makes none; give a range such as seq_len=512..2048")
        folder = tmp_path / f"predicted-{len(list(tmp_path.iterdir()))}"
        limit = [] if max_reserved is None else ["--max-reserved", max_reserved]
        own = [f"results={folder.parent}", f"name={folder.name}", "report=false"]
        command = build_command("vramsweep", "predict", *limit, *words, *own)
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        told = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if done.returncode == 2:
            raise UserError(told.removeprefix("vramsweep: "))
        rows = list(terminal(read(folder)[0]).values()) if folder.is_dir() else []
        if done.returncode and max_reserved is not None:
            pytest.fail(told, pytrace=False)
        if not rows:
            raise UserError(f"no row was predicted: {told}")
        return rows

    return predict
