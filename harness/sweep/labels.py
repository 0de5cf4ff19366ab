"""Labels of a sweep's trials: each trial by what varies, and one text for what all have in common.

A trial's settings of one part (its model, its allocator, ...) are called by that part's name, as long as it tells them
apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vramsweep.harness.spec import command_template, runner_table
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial_identity import ID_DEFAULTS
from vramsweep.harness.sweep.plan import Planned

PARTS = ("model", "runner", "device", "allocator", "protocol")
FIRST = ("model.name", "runner.name", "device.name", "device.gpu", "sharding", "world_size", "precision",
         "allocator.name")  # fmt: skip
LAST = ("seq_len", "micro_batch", "seed", "repeat")
WITHIN = (*LAST, "protocol.name")  # settings in which trials of one configuration may differ
FEW = 2
NEVER = ("fingerprints",)
ALONE = ("model.name", "runner.name", "device.name", "device.gpu", "precision", "allocator.name")
SAID = (*ALONE, "protocol.name", "seq_len", "micro_batch")
CALLED = {"seq_len": "seq", "micro_batch": "batch", "world_size": "x", "repeat": "repeat", "seed": "seed"}
OPTIONS = "runner.options."  # a script's own axes are labelled by their names alone


class Labels:
    """Labels of trials by what varies among `planned`: `fp32 · checkpointing=full · seq 512 · batch 4`.

    If more than `FEW` settings vary that have a default, those at their default are left out.
    """

    def __init__(self, planned: Sequence[Planned], but: Sequence[str] = ()) -> None:
        self.keys = tuple(key for key in varying(planned) if key not in but)
        shy = [key for key in self.keys if _at(key) in ID_DEFAULTS and key not in LAST]
        self._shy = frozenset(shy if len(shy) > FEW else ())

    def __call__(self, item: Planned) -> str:
        """Return the label of a trial among the others; if nothing varies, that of the whole trial."""
        values = flatten(item.resolved, {key.partition(".")[0] for key in self.keys})
        known = [key for key in self.keys if values.get(key) is not None]
        told = (key for key in known if key not in self._shy or values[key] != ID_DEFAULTS[_at(key)])
        parts = [describe(key, values[key]) for key in told]
        if parts or known:
            return " · ".join(parts) or "defaults"
        # nothing varies; of a trial that cannot run, what is known of it by name
        return describe_trial(item.trial) if item.trial else _join_settings(flatten(item.resolved), (*FIRST, *LAST[:2]))

    def apart(self, item: Planned) -> str:
        """Return the label of a trial, "" if nothing varies: for a line below `describe_common`."""
        return self(item) if self.keys else ""


def varying(planned: Sequence[Planned]) -> list[str]:
    """Return the settings in which the trials differ, by their full keys, in the order of a label."""
    if not planned:
        return []
    first = planned[0].resolved
    named = ((p.resolved, key) for p in planned for key in (first.keys() | p.resolved.keys()).difference(NEVER))
    top = {key for own, key in named if own.get(key) != first.get(key)}
    values = [flatten(p.resolved, top) for p in planned]
    whole_ones = [p.trial is not None for p in planned]  # an invalid trial may lack settings: ignored
    keys = [
        key
        for key in dict.fromkeys(key for one in values for key in one)
        if len({repr(one.get(key)) for one, has in zip(values, whole_ones, strict=True) if has or key in one}) > 1
    ]
    keys = [key for key in keys if not _follows(key, values)]
    order = {key: n - len(FIRST) for n, key in enumerate(FIRST)} | {key: n + 1 for n, key in enumerate(LAST)}
    return sorted(keys, key=lambda key: order.get(key, 0))


def _follows(key: str, values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the name of the setting's part implies its value."""
    part, _, rest = key.partition(".")
    if part not in PARTS or not rest or rest == "name" or key.startswith(OPTIONS):
        return False
    pairs = {(repr(one.get(f"{part}.name")), repr(one.get(key))) for one in values}
    return len(pairs) == len({name for name, _ in pairs})


def flatten(resolved: Mapping[str, Any], only: set[str] | None = None) -> dict[str, Any]:
    """Return a trial's settings by their full keys (`runner.options.lr`), those below the keys `only`."""
    chosen = {key: value for key, value in resolved.items() if only is None or key in only}
    return {key: value for key, value in runner_table.flatten_options(chosen) if not isinstance(value, Mapping)}


def describe(key: str, value: Any) -> str:
    """Describe a setting in words; values that speak for themselves go without its name."""
    if key in ALONE:
        return str(value)
    if key == "sharding":
        return "no sharding" if value == "none" else str(value)
    if key in CALLED:
        return f"{CALLED[key]} {value}"
    name = key.removeprefix(OPTIONS).removesuffix(".name")
    return f"{name}={catalog.text(value) if isinstance(value, (str, bool, int, float)) else value}"


def _at(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def describe_common(planned: Sequence[Planned]) -> str:
    """Describe what all the trials have in common: their main settings, and others that are not at the default."""
    possible = [p for p in planned if p.trial is not None] or list(planned)
    if not possible:
        return ""
    first, values = possible[0], flatten(possible[0].resolved)
    told_nothing = command_template.unseen_settings(first.trial) if first.trial and first.trial.runner.command else ()
    unsaid = {*varying(planned), *told_nothing}
    return _join_settings(values, [key for key in dict.fromkeys((*FIRST, *values)) if key not in unsaid])


def _join_settings(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    return " · ".join(describe(key, values[key]) for key in keys if _is_worth_naming(key, values.get(key)))


def _is_worth_naming(key: str, value: Any) -> bool:
    """Return whether a setting deserves a word by itself: a main one (`SAID`), or one that is not at its default."""
    at = _at(key)
    if value is None or key in NEVER or (key, value) == ("allocator.name", "default"):
        return False
    if key in SAID:
        return True
    return at in ID_DEFAULTS and at[0] not in ("model", "runner", "allocator") and value != ID_DEFAULTS[at]
