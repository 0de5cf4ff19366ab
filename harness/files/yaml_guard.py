"""A check of YAML files in somebody's --config-dir, before OmegaConf reads them.

OmegaConf copies what an alias stands for, so a file of a few lines can need more memory than there is. Tags of Python
objects are not checked, because Hydra's loader knows none (see `yaml_problem`).
"""

from pathlib import Path

import yaml

from vramsweep.harness.messages.errors import UserError

MOST = 100_000  # values of a file, with its aliases expanded
DEEPEST = 50  # lists and mappings in one another


def check(folder: Path) -> None:
    """Raise UserError, which names the file, for one of over `MOST` values, nested too deep, or unreadable as YAML."""
    try:
        found = sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")])
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; name a folder of YAML files in --config-dir") from None
    for file in found:
        if file.is_file() and _size(file) > MOST:
            raise UserError(
                f"{file} has more than {MOST:,} values with its aliases (*name) expanded, or more than "
                f"{DEEPEST} nested levels; simplify it, or take it out of --config-dir"
            )


def yaml_problem(error: yaml.YAMLError) -> str:
    """Return what is wrong with a file, and where."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{what[:200]}" if mark is None else f"{mark.name}:{mark.line + 1}: {what[:200]}"


def _size(file: Path) -> int:
    """Return a count of values, aliases expanded, or `MOST` + 1 beyond a limit; 0 if invalid, which Hydra reports."""
    whole, anchors = 0, dict[str | None, int]()
    began: list[tuple[str | None, int]] = []  # the anchor of each open list and mapping, and the count before it
    try:
        with file.open("rb") as stream:
            for event in yaml.parse(stream, Loader=yaml.SafeLoader):
                if isinstance(event, yaml.AliasEvent):
                    whole += anchors.get(event.anchor, 1) if event.anchor not in dict(began) else MOST  # holds itself
                elif isinstance(event, yaml.NodeEvent):
                    whole += 1
                    if not isinstance(event, yaml.ScalarEvent):
                        began.append((event.anchor, whole - 1))
                elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                    anchor, before = began.pop()
                    if anchor is not None:
                        anchors[anchor] = whole - before
                if whole > MOST or len(began) > DEEPEST:
                    return MOST + 1
    except (UnicodeDecodeError, yaml.reader.ReaderError, RecursionError):
        raise UserError(f"{file} is not readable YAML; correct it, or take it out of --config-dir") from None
    except (OSError, yaml.YAMLError):
        return 0
    return whole
