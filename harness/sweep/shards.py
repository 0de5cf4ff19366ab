"""A sweep in shards: each takes its own share of one plan, on whatever machine, and writes a journal of its own.

`shard=3/16` takes a sixteenth of the trials, drawn by lot, in the order of the whole. The lot depends on a trial's
position in what the command composes, which is the same on every machine. It does not depend on the order, which
depends on what can run there. So a package that one node lacks moves no trials of the others. Together the shards are
the whole, and no axis is one shard's alone. Pure, except for `refuse_other_division`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal, journal_lock

MOST = 10_000  # shards; a Slurm cluster's MaxArraySize is 1001 unless it was raised
_WRITER = re.compile(r"journal-\d+of(\d+)\.jsonl")


@dataclass(frozen=True)
class Shard:
    """The `number`th of `count` shards, from 1; the only one of one is a whole sweep."""

    number: int = 1
    count: int = 1

    @property
    def writer(self) -> str | None:
        """Name of the shard in its journal's and its plan's file names; None for a whole sweep."""
        return f"{self.number}of{self.count}" if self.count > 1 else None


def parse(text: str | None) -> Shard:
    """Parse `shard=`: 3/16 is the third of sixteen, null is the whole. Raises UserError."""
    if text is None:
        return Shard()
    number, _, count = str(text).partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= MOST):
        raise UserError(
            f"shard={text}: allowed is null or N/COUNT, as shard=1/3, shard=2/3 and shard=3/3; COUNT is up to {MOST:,}"
        )
    return Shard(int(number), int(count))


@dataclass(frozen=True)
class Slurm:
    """The options of each job of a Slurm cluster; conf/cluster/slurm.yaml documents each. Raises UserError."""

    name: str
    partition: str | None = None
    account: str | None = None
    hours: float | None = None
    gpus: int | None = None
    cpus: int | None = None
    mem_gib: float | None = None
    setup: Sequence[str] = ()
    extra: Mapping[str, Any] | None = None
    every: bool = False

    def __post_init__(self) -> None:
        for key, least in (("hours", 0.1), ("gpus", 0), ("cpus", 1), ("mem_gib", 0.1)):
            value, whole = getattr(self, key), key in ("gpus", "cpus")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and least <= value < math.inf):
                kind = "a whole number" if whole else "a number"
                raise UserError(f"cluster.{key}={value}: allowed is null or {kind} of at least {least:g}")
        for key in ("partition", "account"):
            value = getattr(self, key)
            if value is not None and not re.fullmatch(r"[\w.,@-]+", str(value)):
                raise UserError(f"cluster.{key}={value}: allowed is null or a name that sinfo or sacctmgr lists")
        if isinstance(self.setup, str) or not all(isinstance(one, str) for one in self.setup):
            raise UserError(f"cluster.setup={self.setup}: allowed is a list of shell lines, as ['module load cuda']")
        extra = {} if self.extra is None else self.extra
        simple = isinstance(extra, Mapping) and all(isinstance(value, (str, int, float)) for value in extra.values())
        if not simple or not all(re.fullmatch(r"[a-z][a-z-]*", str(key)) for key in extra):
            raise UserError(
                f"cluster.extra={self.extra}: allowed are options of sbatch by their long names, without dashes, as "
                "'cluster.extra={qos:night,constraint:h100}'; an option without a value is true"
            )
        if not isinstance(self.every, bool):
            raise UserError(f"cluster.every={self.every}: allowed is true or false")


def slurm(options: Mapping[str, Any]) -> Slurm | None:
    """Parse the options of `cluster`; None if the sweep runs on this machine. Raises UserError."""
    known = {one.name for one in dataclasses.fields(Slurm)}
    if not isinstance(options, Mapping) or options.get("name") not in ("none", "slurm"):
        raise UserError(f"cluster={options}: allowed is cluster=none or cluster=slurm")
    if unknown := [str(key) for key in options if key not in known]:
        raise UserError(suggestions.unknown_key(f"cluster.{unknown[0]}", None, [f"cluster.{key}" for key in known], ()))
    found = Slurm(**options)
    if options["name"] == "slurm":
        return found
    if given := [key for key in known - {"name"} if options.get(key)]:
        raise UserError(f"cluster.{given[0]}={options[given[0]]} needs cluster=slurm")
    return None


def refuse_other_division(folder: Path, shard: Shard) -> None:
    """Raise UserError, naming the journal, if one of another number of shards is being written: they would share
    trials. Call it once this shard's journal is locked."""
    for file in journal.files(folder):
        found = _WRITER.fullmatch(file.name)
        count = int(found[1]) if found else 1 if file.name == journal.NAME else None
        if count != shard.count and file.exists() and journal_lock.is_locked(file):
            here = "this sweep" if shard.count == 1 else f"a shard of {shard.count}"
            raise UserError(f"another sweep is writing {file}, and {here} would run its trials too; wait for its end")
