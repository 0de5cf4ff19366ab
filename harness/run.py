"""`vramsweep run ... -- COMMAND`: a sweep of a command of the user's own, as runner=script.

Everything else is a sweep's: its words (launch.py), its rows and folder (sweep.py). Not covered: what placeholders mean
(script.py), how the command is run and watched (runners/script.py, runners/observer.py).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from vramsweep.harness import launch, overrides, plan, script
from vramsweep.harness.command import value
from vramsweep.harness.errors import UserError
from vramsweep.harness.plan import Planned
from vramsweep.harness.trial import Trial

HELP = """\
measure a training command of your own, as it is: every combination of the settings before -- is a trial of it

  vramsweep run seq_len=512,1024 micro_batch=1,2 allocator=default,expandable -- \\
      python train.py --max_len {seq_len} --bs {micro_batch}
  vramsweep run precision=bf16,fp32 lr=1e-4,1e-5 -- python train.py {precision:bf16=--bf16:fp32=} --lr {lr}
  vramsweep run world_size=2 seq_len=512 -- torchrun --nproc-per-node {world_size} train.py --max_len {seq_len}

A {name} in the command is a setting (seq_len, micro_batch, grad_accum, precision, world_size, ...), a name of your own
given before --, or {output_dir}, a folder for what the script writes, or {steps}. {name:value=TEXT:...} writes TEXT
for a value. What the command is not told is unknown in the rows, whatever it does.

The script needs no change. It is watched from inside: optimizer steps, forward and backward passes, the allocator's
counters. Once the protocol's steps are over it is ended, unless runner.stop=false. docs/script.md tells more."""


def main(argv: Sequence[str]) -> int:
    """`run`; returns the exit status of the sweep that it is. Raises UserError for a mistake."""
    before, dashes, command = _apart(argv)
    parser = argparse.ArgumentParser(
        prog="vramsweep run",
        usage="%(prog)s [--dry-run] [GROUP=OPTION ...] [KEY=VALUE ...] -- COMMAND",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="only show the command of every trial")
    options, rest = parser.parse_known_args(before)
    if not command:
        what = "nothing stands behind --" if dashes else "the command stands behind --"
        raise UserError(f"{what}: vramsweep run seq_len=512,1024 -- python train.py --max_len {{seq_len}}")
    given = words(rest, command)
    if options.dry_run:
        return _show(launch.resolve(given, verb="run")[0])
    return launch.main(given, front=launch.Front(), verb="run")


def words(before: Sequence[str], command: Sequence[str]) -> list[str]:
    """What the command line is to `vramsweep sweep`. A setting that the command alone knows is one of its options."""
    text = command[0] if len(command) == 1 else shlex.join(command)  # a quoted whole is one word
    told = script.names(text)
    for word in before:
        name = word.partition("=")[0]
        if name in script.UNSAID and name not in told:
            raise UserError(
                f"{word} does not reach the command: write {{{name}}} where it takes it, {{{name}:VALUE=TEXT:...}} if "
                "it calls a value otherwise"
            )
    own = told - set(Trial.model_fields) - set(plan.SETTINGS) - set(overrides.options())
    found = [f"+runner.options.{word}" if word.partition("=")[0] in own else word for word in before]
    if not any(word.partition("=")[0] == "device" for word in before):
        device = "cuda" if launch.detect() == "cuda" else "cpu"
        if device == "cpu":
            print("no usable CUDA device: measuring on device=cpu", file=sys.stderr)
        found.append(f"device={device}")
    return ["-m", "runner=script", f"runner.command={value(text)}", *found]


def _apart(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def _show(planned: Sequence[Planned]) -> int:
    """Print the command of every trial, with the allocator's variable; for one that cannot run, why."""
    for item in planned:
        if item.trial is None:
            print(f"# cannot run: {item.reason}")
            continue
        conf = plan.worker_conf(item.trial)
        variable = f"PYTORCH_CUDA_ALLOC_CONF={shlex.quote(conf)} " if conf else ""
        place = f"attempts/{item.trial_id}/1/output"
        print(f"{variable}{shlex.join(script.words(item.trial, place))}")
    return 2 if planned and all(item.trial is None for item in planned) else 0
