"""Scripts of several ranks on a simulated card: rank 0 of a group whose other ranks do not exist."""

from pathlib import Path
from typing import Any

import pytest
from commands import BIN, command
from conftest import TARGETS, parametrized, tiny

from vramsweep.harness.allocator import config
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import make_trace
from vramsweep.runners.predict.replay_trace import Prediction, replay
from vramsweep.runners.scripts import traced_ranks, traced_script

pytestmark = pytest.mark.deterministic


def predicted(folder: Path, values: dict[str, Any], runner: Any = None) -> tuple[Prediction, dict[str, Any]]:
    trial = trial_parser.parse(values | {"device": {"name": "simulated", "gpu": "h100-80gb"}})
    trace, details = make_trace.trace_trial(trial, trial.device.card, folder, runner)
    return replay(trace, config.parse(""), None), details


@pytest.mark.parametrize(("kind", "parts"), [("ddp", 1), ("fsdp1", 2), ("fsdp2", 2)])
def test_a_script_of_two_ranks_needs_what_our_own_runner_does(tmp_path: Path, kind: str, parts: int) -> None:
    target = TARGETS / "divided.py"
    words = f"{BIN}/torchrun --nproc-per-node=2 {target} {kind}"
    script, details = predicted(tmp_path, command(words, world_size=2), traced_script)
    runner = {"name": "custom", "target": f"{target}:{kind}"}
    ours, _ = predicted(tmp_path, tiny(runner=runner, sharding=kind, world_size=2, model={"name": "own"}))
    assert script.peak == ours.peak
    assert (details["world_size"], details["notes"], details["not_covered"]) == (2, None, ["ranks"])
    assert script.breakdown["parameters"] * parts == 4 * (2 * 256 * 512 + 512 + 256)


@parametrized("launchers")
def test_a_launcher_starts_rank_0(words: str, rest: str, ranks: str, of_a_node: str) -> None:
    module, *options = words.split()
    given, variables = traced_ranks.launched(module, options, trial_parser.parse(tiny()))
    found = [variables[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    assert (" ".join(given), found) == (rest, ["0", "0", ranks, of_a_node])


@pytest.mark.slow
def test_one_rank_of_fsdp2_as_its_user_measured_it(tmp_path: Path) -> None:
    found, details = predicted(tmp_path, command("PYTHON SCRIPTS/fsdp1rank.py"), traced_script)
    assert found.peak["allocated"] == pytest.approx(24.65e9, rel=0.005) and details["world_size"] == 1
