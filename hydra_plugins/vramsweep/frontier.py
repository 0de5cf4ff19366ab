"""The thin Hydra side of `sweep=frontier`: finds the maximum that fits of one axis with a range, round by round.

Every other setting with several values makes configurations. A round has one trial of each configuration whose maximum
is not known yet. harness/questions/edge_search.py says what is tried next, and what is known before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep

from hydra_plugins.vramsweep.launcher import FREE, SweeperConf, VramsweepSweeper
from vramsweep.harness.config.overrides import FULL_ERROR, variable
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import edge_search
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.search.axis_search import drive
from vramsweep.harness.sweep.labels import OPTIONS

if TYPE_CHECKING:
    from vramsweep.harness.config.compose import HydraTask

LENGTHS = "seq_len=range(64,8193,64)"  # if neither a length nor a range of batches is given


@dataclass
class FrontierConf(SweeperConf):
    """Settings of hydra/sweeper=frontier."""

    _target_: str = "hydra_plugins.vramsweep.frontier.FrontierSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="frontier", node=FrontierConf, provider="vramsweep")


class FrontierSweeper(VramsweepSweeper):
    """The sweeper that searches the maximum of each configuration; a plan has the first round only."""

    def sweep(self, arguments: list[str]) -> Any:
        """Run the rounds, each a batch; return what the launcher returns of them. Raises UserError for a mistake."""
        assert self.hydra_context is not None
        launcher: Any = self.launcher  # ours; Hydra has imported another copy of its module
        if self.max_batch_size is not None:
            raise UserError("hydra.sweeper.max_batch_size: sweep=frontier sets its own batches; leave it out")
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        if not any(one.key_or_group == "seq_len" or _ranged(one) for one in overrides):
            overrides.append(parser.parse_override(LENGTHS))
        axis = _axis(overrides)
        values = _values(axis)
        name = axis.key_or_group
        word = f"+{name}='{{}}'" if name.startswith(OPTIONS) else f"{name}={{}}"
        others = [one for one in overrides if one.key_or_group != name]
        settings = [words for batch in self.split_arguments(others, None) for words in batch]
        jobs = launcher.compose([[*words, word.format(values[0])] for words in settings])
        task: HydraTask = launcher.task
        if task.of_cases:
            raise UserError("a preset with cases runs as a whole; hydra/sweeper=frontier needs one without cases")
        session, configs = task.session, task.plain_values(jobs)
        with variable(FULL_ERROR, None):  # which workers must not inherit
            ahead = edge_search.prepare_searches(session, configs, name, values)
        searches = [edge_search.Search(one) for one in ahead]
        returns: list[Any] = []

        def launch(asked: Mapping[int, list[int]]) -> dict[int, dict[int, Row]]:
            batch = [[*settings[n], word.format(value)] for n, [value] in asked.items()]
            returns.append(launcher.launch(batch, initial_job_idx=sum(map(len, returns))))
            rows = [done.return_value for done in returns[-1]]  # None if it is only planned
            points = zip(asked.items(), rows, strict=True)
            return {n: {value: row} for (n, [value]), row in points if row is not None}

        drive(searches, launch)
        edge_search.report_searches(session, searches, name)
        return returns


def _axis(overrides: list[Override]) -> Override:
    """Return the override to search: edge_of=, or a length, batch or option with a range. Raises UserError."""
    last = {one.key_or_group: one for one in overrides if one.key_or_group in FREE or _ranged(one)}
    swept = {key: one for key, one in last.items() if one.is_sweep_override()}
    named = [one for one in overrides if one.key_or_group == "edge_of"]
    if named and named[-1].value() is not None:
        wanted = str(named[-1].value())
        if wanted in FREE and wanted not in swept:
            raise UserError(f"edge_of={wanted}: give the values to search, such as '{wanted}=range(1,8193)'")
        if wanted in swept:
            return swept[wanted]
    ranges = list(filter(_ranged, swept.values()))
    if not (found := ranges or list(swept.values())):
        raise UserError(f"sweep=frontier searches for the largest length or batch that fits; give '{LENGTHS}'")
    if len(found) > 1:
        raise UserError("seq_len and micro_batch both have several values; choose the one to search: edge_of=seq_len")
    return found[0]


def _ranged(override: Override) -> bool:
    key = override.key_or_group
    return (key in FREE or key.startswith(OPTIONS)) and isinstance(override._value, RangeSweep)


def _values(axis: Override) -> list[int]:
    """Return the axis's values, ascending. Raises UserError without values, or if one is no integer from 1."""
    texts = list(map(str, axis.sweep_string_iterator()))
    name = axis.key_or_group
    if not all(text.isascii() and text.isdigit() and int(text) > 0 for text in texts):
        raise UserError(
            f"{axis.input_line}: sweep=frontier searches whole numbers from 1, such as '{name}=range(64,8193,64)'"
        )
    if not (values := sorted(set(map(int, texts)))):
        raise UserError(f"{axis.input_line} has no value; a range is '{name}=range(FIRST,END,STEP)' and excludes END")
    return values
