"""The parser of plain values to a valid Trial: types, canonical texts, fingerprints of files, rules of all tables."""

import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.files import plain_json
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import EnvironmentFault, describe
from vramsweep.harness.spec import command_template, length_distribution, runner_table, trial_rules
from vramsweep.harness.spec.trial import InvalidTrial, Trial


def parse(values: Mapping[str, Any]) -> Trial:
    """Return a Trial from plain values, with the allocator text made canonical and named local files fingerprinted.

    Raises InvalidTrial if a value has the wrong type or range, or if the combination breaks a rule.
    """
    if (why := plain_json.json_problem(dict(values), 1 << 63)) is not None:
        raise InvalidTrial(why)
    try:
        trial = Trial.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where, given = ".".join(str(part) for part in first["loc"]), describe(first["input"])
        if where.startswith("versions.") and first["type"] == "string_type":
            raise InvalidTrial(f"{where} = {given} is a number; write a whole version, such as 0.14.2") from None
        near = ""
        if first["type"].startswith("int_") and first["input"] is not None:
            raise InvalidTrial(f"{where} = {given}: allowed is a whole number") from None
        if first["type"] in ("greater_than", "greater_than_equal"):
            least = "allowed is more than {gt}" if first["type"] == "greater_than" else "allowed is {ge} or more"
            raise InvalidTrial(f"{where} = {given}: {least.format(**first['ctx'])}") from None
        if first["type"] == "literal_error" and isinstance(first["input"], str):
            near = suggestions.did_you_mean(first["input"], re.findall(r"'([^']*)'", first["ctx"]["expected"]))
        raise InvalidTrial(f"{where} = {given}: {first['msg'][0].lower()}{first['msg'][1:]}{near}") from None
    try:
        conf = allocator_config.parse(trial.allocator.conf)
    except allocator_config.AllocatorConfigError as error:
        raise InvalidTrial(f"allocator {trial.allocator.name}: {error}") from None
    allocator = trial.allocator.model_copy(update={"conf": conf.render()})
    trial = trial.model_copy(update={"allocator": allocator, "fingerprints": _fingerprints(trial)})
    rules = (runner_table.runner_rules_of, *trial_rules.RULES)
    for reason in itertools.chain.from_iterable(rule(trial) for rule in rules):
        raise InvalidTrial(reason)  # only the first: later ones may not make sense
    return trial


def _fingerprints(trial: Trial) -> dict[str, str]:
    # a command reads its models and data itself
    named = command_template.command_files(trial) if trial.runner.command else _named(trial)
    try:
        return {str(path): _fingerprint(path) for path in named if length_distribution.is_file(path)}
    except OSError as error:
        raise InvalidTrial(f"{error.filename} cannot be read: {error.strerror}; make it readable") from None


def _fingerprint(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def require_unchanged_files(trial: Trial) -> None:
    """Check that the trial's files still have the content that its id was computed from.

    Raises EnvironmentFault otherwise, because a row would be of other content than its id. InvalidTrial would be
    permanent, but the trial can run once the file is put back.
    """
    for path, fingerprint in trial.fingerprints.items():
        if not length_distribution.is_file(Path(path)) or _fingerprint(path) != fingerprint:
            raise EnvironmentFault(length_distribution.CHANGED.format(path))


def _named(trial: Trial) -> list[Path]:
    """Return the files that a trial's settings name."""
    named = []
    if trial.runner.target:
        named.append(Path(trial.runner.target.rpartition(":")[0]))
    if trial.model.path:
        named.append(Path(trial.model.path) / "config.json")
        if trial.model.trust_remote_code:
            named += sorted(Path(trial.model.path).glob("*.py"))
        if trial.data != "synthetic" and not length_distribution.names_lengths(trial.data):
            named.append(Path(trial.model.path) / "tokenizer.json")
    if trial.data != "synthetic":
        named.append(length_distribution.lengths_file(trial.data) or Path(trial.data))
    if trial.ds_config is not None:
        named.append(Path(trial.ds_config))
    return named
