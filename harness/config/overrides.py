"""The words of a command line, between the user and Hydra.

In: words as typed. Out: words with today's names. Words that Hydra would take otherwise than meant are refused. Hydra's
errors become messages that say what is allowed.
"""

import argparse
import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, ValueType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from vramsweep.harness.config import conf_files, settings_reference
from vramsweep.harness.config.conf_files import AUTO, CONF
from vramsweep.harness.files import redaction, yaml_guard
from vramsweep.harness.messages import suggestions, units
from vramsweep.harness.messages.argument_parser import Parser
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import migrations
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import RunnerAxis

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: raise errors instead of printing them and ending the process


def parse(argv: Sequence[str], action: str, verb: str = "sweep") -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return the arguments, with old names replaced, and the parser. Raises UserError for a mistake."""
    parser = get_args_parser()
    parser.prog = f"vramsweep {'plan' if action == 'plan' else verb}"
    parser.error = partial(Parser.error, parser)  # type: ignore[method-assign, arg-type]
    short = {"--json": "output=json"} | ({"--all": "output=all"} if action == "plan" else {})
    args = parser.parse_intermixed_args([short.get(word, word) for word in argv])
    given = {word.partition("=")[0] for word in args.overrides}
    words = [today(word) for word in args.overrides]
    for old, new in zip(args.overrides, words, strict=True):
        key = new.partition("=")[0]
        if old.partition("=")[0] != key and key in given:  # a value's old name contradicts nothing
            raise UserError(f"{old} is {new} by its old name, and {key} is given too; leave one out")
    if "runner=fsdp" in args.overrides and given & {"sharding"} and "sharding=fsdp2" not in args.overrides:
        raise UserError("runner=fsdp is runner=torch with sharding=fsdp2, and another sharding is given; leave one out")
    args.overrides = words
    return args, parser


def today(override: str) -> str:
    """Return an override of version 0.1 (`runner.zero_stage=1`) in today's words. Raises UserError.

    A size or time (device.memory_gib=24GiB) becomes a bare number in the unit that its key names. All else is kept.
    """
    key, _, value = override.partition("=")
    if key == "runner.zero_stage":
        stages = [stage.strip() for stage in value.split(",")]
        if not all(stage.isdigit() for stage in stages):
            raise UserError(f"{override}: ZeRO's stage is set by sharding= now; give sharding=zero1,zero2")
        return "sharding=" + ",".join(f"zero{stage}" for stage in stages)
    if key == "gradient_checkpointing":
        now = {"true": "full", "false": "none"}
        return "checkpointing=" + ",".join(now.get(v.strip(), v) for v in value.split(","))
    if key == "optimizer":
        return "optimizer=" + ",".join(migrations.OPTIMIZERS.get(v.strip(), v) for v in value.split(","))
    if key.startswith("runner.") and key.removeprefix("runner.") in migrations.MOVED:
        return override.removeprefix("runner.")
    if any(f"{key.lstrip('+')}.".startswith(f"{place}.") for place in suggestions.OPEN):  # keys and values not ours
        return override
    named = [units.in_its_unit(key.lstrip("+"), one.strip()) for one in value.split(",")]
    return f"{key}={','.join(named)}" if named != [one.strip() for one in value.split(",")] else override


def loader(args: argparse.Namespace) -> ConfigLoaderImpl:
    """Return a loader of what Hydra itself will read: the user's --config-dir, then conf/ or --config-path."""
    path = create_automatic_config_search_path(None, None, args.config_path or str(CONF))
    if args.config_dir is not None:
        own = f"file://{Path(args.config_dir).resolve()}"
        path.prepend(provider="command-line", path=own, anchor=SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(path)


def check(args: argparse.Namespace) -> None:
    """Raise UserError for secrets, and for words that Hydra would misread or refuse without a reason."""
    if said := redaction.secrets_problem(args.overrides):
        raise UserError(said)
    if args.config_dir is not None:
        yaml_guard.check(Path(args.config_dir))
    groups = loader(args)
    parsed = _parsed(args.overrides)
    given = {override.key_or_group: override for override in parsed}
    sweeps, sweeper = (_plain(given.get(key)) for key in ("sweep", "hydra/sweeper"))
    if sweeps == "frontier" and sweeper not in (None, "frontier"):
        raise UserError(f"{given['hydra/sweeper'].input_line}: sweep=frontier is a sweeper of its own; leave one out")
    for override in parsed:
        key, text = override.key_or_group, str(override.input_line)
        if not key:
            raise UserError(suggestions.describe_unreadable(text, {}))
        values: list[Any] = override._value.list if isinstance(override._value, ChoiceSweep) else [override._value]
        texts = [value.text if isinstance(value, QuotedString) else str(value) for value in values]
        leads_out = [one for one in texts if one.startswith("/") or ".." in one.split("/")]
        if leads_out and groups.repository.group_exists(key):
            where = f"an option is a file of conf/{key}, or of {key}/ in --config-dir DIR"
            raise UserError(f"{key}={leads_out[0][:60]}: {where}; its name has no .. and no leading /")
        numbers = [value for value in values if isinstance(value, (bool, int, float))]
        if numbers and groups.repository.group_exists(key):
            allowed = _allowed(key, groups.get_group_options(key))
            raise UserError(suggestions.unknown_option(key, str(numbers[0]), allowed))
        simple = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP
        if key == "allocator.conf" and simple and not all(isinstance(value, QuotedString) for value in values):
            raise UserError(suggestions.unquoted_settings(text))


def several_trials(words: Sequence[str]) -> bool:
    """Return whether the words name a sweep, as with -m: a setting has several values, or a preset is named."""
    parsed = _parsed(words)
    return any(one.is_sweep_override() or (one.key_or_group == "sweep" and _plain(one) != "none") for one in parsed)


def _plain(override: Override | None) -> str | None:
    """Return the word's value if it is a text, quoted or not; else None."""
    value = None if override is None else override.value()
    return value if isinstance(value, str) else None


def _allowed(group: str, options: Sequence[str]) -> list[str]:
    return [*options, *(["auto"] if group in AUTO else [])]


def _depth(override: str) -> int:
    """Return the largest number of brackets and braces open at once in an override, not counting those in quotes."""
    bare = re.sub(r"""(["'])(?:\\.|(?!\1)[^\\])*\1""", "", override)
    return max(itertools.accumulate((char in "[{(") - (char in "]})") for char in bare), default=0)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    most = yaml_guard.DEEPEST  # fewer than Hydra and OmegaConf can read, however deep the caller's stack is
    if any(_depth(one) > most for one in overrides):
        raise UserError(f"a setting is nested too deep: at most {most} lists and objects may be inside one another")
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except RecursionError:
        raise UserError("a setting is nested too deep to be read; write it in a file of --config-dir") from None


@contextlib.contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for the block; None unsets it."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def explained(overrides: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's errors in the block into a UserError; with HYDRA_FULL_ERROR=1 leave them as they are."""
    if os.environ.get(FULL_ERROR) == "1":
        yield
        return
    try:
        with variable(FULL_ERROR, "1"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explanation(error, overrides)) from None
    except yaml.YAMLError as error:
        raise UserError(f"--config-dir: {yaml_guard.yaml_problem(error)}") from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise UserError(
            "a setting, or a file of --config-dir, has a number with thousands of digits; shorten it"
        ) from None


def _explanation(error: Exception, overrides: Sequence[str]) -> str:
    """Return a message for a Hydra error about these overrides: what was wrong, what is allowed, what to type."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    lines = [line.strip() for line in f"{error}\n{cause}".splitlines() if line.strip()]
    text = next(iter(lines), repr(error))
    if text.startswith(("Error merging override", "Error in call to target")):  # the reason is in the cause
        return f"{text.rstrip(':')}: {next(iter(str(cause).strip().splitlines()), repr(cause))}"
    if isinstance(error, OverrideParseException):
        values = {key: list(conf_files.list_options(key)) for key in ("sharding", "optimizer")}
        return suggestions.describe_unreadable(error.override, values | options())
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return suggestions.unknown_option(group, option, _allowed(group, error.options))
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
        key = str(cause.full_key)
        beside = [str(name) for name in cause.parent_node if name != "hydra"]
        if "." not in key:
            beside += options()
        override = next((o for o in overrides if o.lstrip("+~").partition("=")[0] == key), None)
        return suggestions.unknown_key(key, override, beside, keys())
    if text.startswith(("Ambiguous value", "Sweep parameters")):
        return suggestions.several_values(next(str(o.input_line) for o in _parsed(overrides) if o.is_sweep_override()))
    added = next((o for o in overrides if o.startswith("+") and o[1:].partition("=")[0] in text), None)
    again = ("already at", "more than once", "Multiple values for", "force-add of config groups")
    if added and any(one in text for one in again):
        return f"{added}: it exists already; to change it, leave out the +: {added.lstrip('+')}"
    return text


for _group, _name in settings_reference.unwritten():  # on import, because Hydra imports our plugin whenever it composes
    _node = {_group: _name if _group == "precision" else RunnerAxis(name=_name).model_dump()}
    ConfigStore.instance().store(_name, _node, group=_group, package="_global_", provider="vramsweep")


def options() -> dict[str, list[str]]:
    """Return the options of each of our config groups."""
    return {group.name: sorted(one.name for one in group.options) for group in settings_reference.groups()}


def keys() -> list[str]:
    """Return the full keys of all settings of the default configuration, including each group's default option."""
    path = create_automatic_config_search_path(None, None, str(CONF))
    config = ConfigLoaderImpl(path).load_configuration("config", [], RunMode.RUN)
    found: Any = OmegaConf.to_container(config)
    return [key for key, _ in runner_table.flatten_options(found) if not key.startswith("hydra")]
