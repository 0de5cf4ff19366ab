"""`vramsweep sweep`: every combination of the settings' values, run as trials (run_words.py)."""

from collections.abc import Sequence

from vramsweep.harness.verbs import run_words


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep sweep`; return the exit status. Raises UserError for a mistake."""
    return run_words.run_sweep(argv)
