"""`plan`: what a sweep would run, what cannot run and why, what it needs, how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from vramsweep.harness.sweep.session import refuse_invalid
from vramsweep.harness.verbs import plan_preview


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep plan`; return the exit status."""
    from vramsweep.harness.config import compose  # and Hydra, which no refusal needs

    asked = compose.resolve(argv, "plan", action="plan")
    if asked.settings is not None:
        plan_preview.show_session(asked)
        refuse_invalid(p.reason for p in asked.trials)
    return 0
