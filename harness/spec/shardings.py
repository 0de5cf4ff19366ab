"""The table of shardings, by which ranks divide the work: an entry each, with all that the harness must know of it.

A new sharding is an entry in shardings.json and a module; the tuples below the table follow from it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sharding:
    """A sharding: a way in which ranks divide a model's weights, gradients and optimizer state.

    `module` does it (runners/shardings/interface.py says which functions it has). `library` wraps the model, and its
    rules hold: ddp, fsdp or deepspeed. `stage` is ZeRO's. `preload` is what a fork server imports for it (of ZeRO's,
    DeepSpeed's first initialise imports the last two). `options` are arguments of the wrapper, which runner=torch
    passes on. `arguments` are TrainingArguments that reach it alone (transformers 5.23,
    Trainer._build_accelerator_args). `runners` support it, next to those whose own entries name it (runner_table.py).
    `measurement` is raised when what is measured under it changes, because old rows no longer count.

    `simulated`: it can be predicted. `whole`: each rank has its own copy of the weights. `readable`: a weight can be
    read outside its own layer. `offloads` are the axes by which it moves state to host memory.
    """

    name: str
    meaning: str
    module: str | None = None
    library: str = ""
    stage: int | None = None
    preload: tuple[str, ...] = ()
    measurement: int = 1
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    runners: tuple[str, ...] = ()
    simulated: bool = False
    whole: bool = False
    readable: bool = False
    offloads: tuple[str, ...] = ()


def tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


_ENTRIES = json.loads(Path(__file__).with_name("shardings.json").read_text("utf-8"))
SHARDINGS = tuple(Sharding(**{field: tuples(value) for field, value in entry.items()}) for entry in _ENTRIES)
NAMES = tuple(s.name for s in SHARDINGS)
DDP, FSDP, ZERO = (tuple(s.name for s in SHARDINGS if s.library == name) for name in ("ddp", "fsdp", "deepspeed"))
WHOLE = tuple(s.name for s in SHARDINGS if s.whole)
READABLE = tuple(s.name for s in SHARDINGS if s.readable)
OF_TORCH = tuple(name for name in NAMES if name not in ("none", *ZERO))  # of several ranks, without DeepSpeed
PLAIN = tuple(name for name in WHOLE if name not in ZERO)  # whole weights, of torch's own dtypes and optimizer
