"""Hydra's configurations turned into plain values, and the resolvers that conf/ refers to."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from vramsweep.harness.config import overrides
from vramsweep.harness.files import redaction
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec import command_template, deepspeed_config
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import plan

Job = tuple[DictConfig, dict[str, int]]  # a configuration, which several jobs may share, and values to set in it


def plain_values(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return each job's plain values. Raises UserError for a missing value and for a key that is not ours."""
    resolved = {id(config): _resolved(config) for config in {id(config): config for config, _ in jobs}.values()}
    return [resolved[id(config)] | values for config, values in jobs]


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return the configuration's plain values. Raises UserError for a missing value, an unknown key and a secret."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: give {error.full_key}=VALUE") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(values, dict)
    if said := redaction.secrets_problem(values):
        raise UserError(said)
    if redaction.contains_secret(values, worker_environment.secrets(os.environ)):  # by ${oc.env:NAME}, in a file
        raise UserError(
            "a setting holds the value of an environment variable that may be a secret (*TOKEN*, *KEY*, ...) and would "
            "be written into the results; leave it out, because workers have the variable anyway"
        )
    required = {*plan.SETTINGS, *(name for name, kind in Trial.model_fields.items() if kind.is_required())}
    if gone := sorted(required - values.keys()):
        raise UserError(f"{gone[0]} was removed from the configuration, but is needed; give {gone[0]}=VALUE")
    known = {*plan.SETTINGS, *Trial.model_fields}
    if unknown := [str(key) for key in values if key not in known]:
        allowed = [*(known - {"repeat", "fingerprints"}), *overrides.options()]
        text = suggestions.unknown_key(unknown[0], None, allowed, overrides.keys())
        raise UserError(f"{text}; a group of your own (+GROUP=OPTION) needs --config-dir DIR")
    return {str(key): value for key, value in values.items()}


def _target(target: str | None) -> str:
    """Return the model name file.build of `path/to/file.py:build`; a missing target is refused by another rule."""
    path, _, function = (target or "").rpartition(":")
    return f"{Path(path).stem}.{function}" if path else "target"


def _from_deepspeed(axis: str, otherwise: Any, *, _root_: Any) -> Any:
    """Return the ds_config's value of an axis that is left alone, or `otherwise` without a readable one."""
    with contextlib.suppress(UserError):
        if path := _root_.get("ds_config"):
            return deepspeed_config.axes(deepspeed_config.read(str(path)), _root_.world_size).get(axis, otherwise)
    return otherwise


# registered on import, because Hydra imports our plugin whenever it composes
OmegaConf.register_new_resolver("vramsweep.said", _from_deepspeed, replace=True)
OmegaConf.register_new_resolver("vramsweep.target", _target, replace=True)
OmegaConf.register_new_resolver("vramsweep.program", lambda of: command_template.program(of or ""), replace=True)
