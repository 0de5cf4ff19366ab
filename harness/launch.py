"""The command line of `sweep` and `plan`: from words to configurations (Hydra) to planned trials.

Hydra calls `launch` with every configuration at once (through hydra_plugins/vramsweep). Not covered: running the
trials (sweep.py), showing them (preview.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vramsweep.harness import machine, plan, preview, sweep
from vramsweep.harness.command import CONF
from vramsweep.harness.errors import UserError
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Row

_status = 0  # Hydra's main returns nothing, so the verdict of the last launch is left here


def main(argv: Sequence[str], action: str = "run") -> int:
    """`sweep` and `plan`: Hydra's command line. Returns 0 if every trial has an answer, 1 if some failed."""
    overrides = ["output=json" if word == "--json" else word for word in argv]
    sys.argv = ["vramsweep sweep", *choose_device(overrides), *([f"action={action}"] if action != "run" else [])]
    signal.signal(signal.SIGTERM, _interrupt)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_single)()
    return _status


def choose_device(overrides: Sequence[str]) -> list[str]:
    """Replace `device=auto` (also meant when no device is given) and `sweep=auto` by what this machine has."""
    given = [o for o in overrides if o.startswith("device=")]
    rest = [o for o in overrides if o != "device=auto"]
    if not given or "device=auto" in given:
        cuda = bool(machine.visible_gpus(os.environ)) and machine.torch_cuda() is not None
        if not cuda:
            print("no usable CUDA device: predicting memory on device=simulated (device=cpu measures)", file=sys.stderr)
        rest.append(f"device={'cuda' if cuda else 'simulated'}")
    device = next(o for o in reversed(rest) if o.startswith("device=")).removeprefix("device=")
    return [f"sweep={device}" if o == "sweep=auto" else o for o in rest]


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _single(config: DictConfig) -> None:
    """Hydra's task function, for a call without -m: one trial is a sweep of one."""
    launch([config])


def launch(configs: Sequence[DictConfig]) -> list[Row | None]:
    """Run, or only plan, the trials of the configurations; returns each one's terminal row (None: not run).

    A UserError is printed and ends the process with status 2: Hydra would bury it in a traceback.
    """
    global _status
    try:
        resolved = [_resolved(config) for config in configs]
        settings = plan.settings(resolved)
        expanded = plan.expand(resolved, settings.repeats)
        planned = plan.order(expanded)
        folder = Path(settings.results) / (settings.name or _name(planned))
        if settings.action == "plan":
            preview.show(planned, settings, folder)
            finished: dict[str, Row] = {}
        else:
            finished, _status = sweep.run(planned, settings, folder)
    except UserError as error:
        print(f"vramsweep: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return [finished.get(trials[0].trial_id) for trials in expanded]


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key
        raise UserError(f"{key} is not set: give {key}=VALUE") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _name(planned: Sequence[Planned]) -> str:
    def of(key: str) -> str:
        names = {str((p.resolved.get(key) or {}).get("name")) for p in planned}
        return "+".join(sorted(names)).replace("/", "_")

    return f"{of('model')}-{of('runner')}-{of('device')}"
