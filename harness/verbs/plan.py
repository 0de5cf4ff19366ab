"""`plan`: the trials that a sweep would run, those that cannot run and why, the memory needed, the time."""

from collections.abc import Sequence

from vramsweep.harness.sweep.session import refuse_invalid
from vramsweep.harness.verbs import plan_preview


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep plan`; return the exit status."""
    from vramsweep.harness.config import compose  # here, because it imports Hydra, which no refusal needs

    asked = compose.resolve(argv, "plan", action="plan")
    if asked.settings is not None:
        plan_preview.show_session(asked)
        refuse_invalid(p.reason for p in asked.trials)
    return 0
