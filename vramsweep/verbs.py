"""Every verb of `vramsweep`, as data: name, section, one line, examples, what its exit status 1 means, its parser.

Help texts, the tests of the command line and the documentation are made from `VERBS`. Nothing here runs a
verb or reads a row: `Verb.parser` imports the module that has it, no more. A new verb is an entry here, and a module
of its name in harness/verbs/ (what runs something) or a function in analysis/cli.py (what reads rows).
"""

from __future__ import annotations

import argparse
import importlib
import textwrap
from dataclasses import dataclass

from vramsweep.harness.messages.argument_parser import WIDTH, Parser

HARNESS, ANALYSIS, FRONT = "harness.verbs", "analysis", "front"  # where a verb's code is
SWEEP, PREDICT, LOOK, ABOUT = "Sweep and watch", "Predict, for a GPU that need not be here", "Look at rows", "About"
NO_CACHE = "--no-cache"
SECTIONS = (SWEEP, PREDICT, LOOK, ABOUT)
STATUSES = {
    0: "done",
    1: "done, and the answer is no, as a verb's help says; or a traceback, which is a fault of ours",
    2: "a mistake that can be mended: of the words, a file, the machine",
    129: "the terminal has gone (SIGHUP): what ran was finished",
    130: "interrupted",
    141: "whoever read the output has gone, as after `| head`",
}


@dataclass(frozen=True)
class Verb:
    """One verb. `uses` are its arguments in examples. `no` is what status 1 says (None: it never ends so); `settings`:
    it takes GROUP=OPTION, KEY=VALUE."""

    name: str
    section: str
    line: str
    uses: tuple[str, ...]
    side: str
    no: str | None = None
    settings: bool = False

    @property
    def examples(self) -> tuple[str, ...]:
        """Commands to try."""
        return tuple(f"vramsweep {self.name} {one}".strip() for one in self.uses)

    @property
    def reads_rows(self) -> bool:
        """Whether its first word may be a folder or file of rows."""
        return self.side == ANALYSIS or self.name in ("explain", "timeline", "status", "check")

    def parser(self) -> argparse.ArgumentParser:
        """The verb's own parser: usage, options, and in `description` what there is to say beyond the line."""
        if self.side == FRONT:
            parser = Parser(prog="vramsweep help")
            parser.add_argument("verb", nargs="?", metavar="VERB", choices=list(BY_NAME), help="one that it lists")
            return parser
        found: argparse.ArgumentParser = importlib.import_module(f"vramsweep.{self.side}.cli").parser(self.name)
        if self.settings:  # the front door takes it
            found.add_argument(NO_CACHE, action="store_true", help="use no traces kept for you, and keep none")
        return found

    def help(self, whole: bool = False) -> str:
        """What `vramsweep VERB --help` prints, 40 lines at most; `whole`: all that there is to say (--help-all)."""
        parser = self.parser()
        usage, about = parser.usage and parser.format_usage().removeprefix("usage: ").strip(), parser.description
        words = [action.metavar or action.dest for action in parser._get_positional_actions()]
        parts = [f"usage: {usage or ' '.join([parser.prog, *map(str, words), '[OPTION ...]'])}", self.line]
        parts.append("\n".join(f"  {one}" for one in self.examples))
        paragraphs = (about or "").split("\n\n")[: None if whole else 1]
        parts += [textwrap.fill(paragraph, WIDTH, break_on_hyphens=False) for paragraph in paragraphs]
        parser.description, parser.usage = None, argparse.SUPPRESS
        parts.append(parser.format_help().strip())
        if self.settings:
            from vramsweep.harness.config import settings_reference

            parts.append(settings_reference.text() if whole else settings_reference.commonest())
        no = f"1, {self.no}; " if self.no else ""
        parts.append(_filled("Status", f"0; {no}2, a mistake; 130, interrupted."))
        if self.settings and not whole:
            parts[-1] += f"\nAll settings, presets and GPUs: vramsweep {self.name} --help-all, docs/options.md"
        return "\n\n".join(filter(None, parts)) + "\n"


_FAILED = "some trials failed"

VERBS: tuple[Verb, ...] = (
    Verb("sweep", SWEEP, "run a sweep: every combination of the settings' values is a trial",
         ("model=gpt2 seq_len=512", "model=gpt2 seq_len=128,256 'micro_batch=range(1,5)' allocator=default,gc",
          "sweep=frontier model=qwen0.5b seq_len=64..8192:64",
          "model=qwen0.5b seq_len=512,1024,2048 device=cuda budget=8h"), HARNESS, _FAILED, settings=True),
    Verb("run", SWEEP, "sweep a training command of your own, as it is",
         ("seq_len=512,1024 micro_batch=1,2 -- python t.py --len {seq_len} --bs {micro_batch}",
          "world_size=2 seq_len=512 -- torchrun --nproc-per-node {world_size} train.py",
          "--dry-run seq_len=512,1024 -- python train.py --max_len {seq_len}",
          "device=simulated gpu=l4-24gb seq_len=512 -- python t.py --len {seq_len}"), HARNESS, _FAILED, settings=True),
    Verb("plan", SWEEP, "what a sweep would run, what cannot run and why, what it needs, how long it takes",
         ("model=gpt2 seq_len=512,1024,2048", "sweep=auto model=qwen0.5b --json",
          "model=qwen0.5b seq_len=512,2048 device=cuda price_per_hour=2.5",
          "model=gpt2 seq_len=512,1024 device=cuda predict=l4-24gb"), HARNESS, settings=True),
    Verb("status", SWEEP, "how far a running or finished sweep is",
         ("", "results/gpt2-torch-cuda", "results/gpt2-torch-cuda --watch 5", "--json"), HARNESS),
    Verb("predict", PREDICT, "predict memory for ranges of lengths and batches: a table of what fits",
         ("model=llama3-8b sharding=fsdp2 world_size=8 seq_len=4096",
          "model=qwen0.5b gpu=a100-80gb seq_len=1..2048 allocator=default,expandable",
          "--largest seq_len model=gpt2 micro_batch=8 gpu=l4-24gb,rtx4090-24gb",
          "--max-reserved 22GiB model=gpt2 seq_len=512,1024"), HARNESS,
         "some trials failed, or reserve more than --max-reserved", settings=True),
    Verb("advise", PREDICT, "which changes make a run fit, what each costs, and which to take together",
         ("model=gpt2 runner=trainer seq_len=512 micro_batch=8 gpu=rtx2070-8gb",
          "model=llama3-8b seq_len=2048 gpu=h100-80gb",
          "--accept rounding model=gpt2 seq_len=1024 micro_batch=32 gpu=l4-24gb",
          "--goal longest model=llama3-8b device.memory_gib=40 device.capability=8.6"), HARNESS, "nothing fits",
         settings=True),
    Verb("explain", PREDICT, "what takes the memory of a predicted run, part by part, and why it does not fit",
         ("model=gpt2 runner=trainer seq_len=512 precision=fp32 gpu=l4-24gb",
          "model=llama3-8b adapter=lora seq_len=4096", "results/gpt2-torch-predicted",
          "model=llama3-8b sharding=fsdp2 world_size=8 seq_len=4096 --json"), HARNESS, settings=True),
    Verb("timeline", PREDICT, "what a predicted step holds from event to event, as a page",
         ("model=gpt2 seq_len=512 gpu=l4-24gb --out step.html",
          "model=llama3-8b adapter=lora seq_len=2048 --out lora.html", "model=gpt2 seq_len=512 gpu=l4-24gb --json",
          "results/gpt2-torch-predicted"), HARNESS, settings=True),
    Verb("replay", PREDICT, "replay a recording of PyTorch's allocator under other settings",
         ("snapshot.pickle", "snapshot.pickle --search --figure replay.html",
          "snapshot.pickle --allocator expandable_segments:True --memory-limit 24GiB",
          "snapshot.pickle --allocator max_split_size_mb:128 --json"), HARNESS),
    Verb("validate", PREDICT, "predict runs that others measured and published, and show how far off that is",
         ("benchmarks/published/*.yaml", "my-run.yaml", "my-run.yaml --json"), HARNESS,
         "a file or a run could not be read or predicted, and does not say so itself (cannot)"),
    Verb("report", LOOK, "figures, tables and one page of a sweep",
         ("results/gpt2-torch-cuda", "results/gpt2-torch-cuda --brief", "results/gpt2-fsdp2-cuda --ranks mean",
          "rows.csv --out page --images none"), ANALYSIS),
    Verb("fit", LOOK, "how memory and speed depend on length, batch or tokens",
         ("results/gpt2-torch-cuda", "results/gpt2-torch-cuda --axis tokens",
          "results/gpt2-torch-cuda --prediction results/gpt2-torch-predicted",
          "rows.csv --metric peak_reserved_bytes --from 256"), ANALYSIS),
    Verb("frontier", LOOK, "the largest length per batch, or batch per length, that fits",
         ("results/gpt2-torch-cuda", "results/gpt2-torch-cuda --gib 24,80", "rows.csv --batch",
          "results/gpt2-torch-cuda --json"), ANALYSIS),
    Verb("compare", LOOK, "two sets of rows: what differs, and whether that is more than chance",
         ("results/before results/after --figure both.html", "results/before results/after --report both.html",
          "results/before results/after --tolerance 0 --all",
          "results/gpt2-torch-cuda --by allocator=default,expandable"), ANALYSIS, "B is slower or needs more memory"),
    Verb("check", LOOK, "may a results folder be published, memory and speed, and why not",
         ("results/gpt2-torch-cuda", "results/gpt2-torch-cuda --claim memory", "results/gpt2-torch-cuda --claim speed",
          "results/gpt2-torch-cuda --json"), HARNESS, "something may not"),
    Verb("calibrate", LOOK, "the estimated speed of simulated rows, corrected by measured rows",
         ("results/gpt2-torch-cuda results/gpt2-torch-simulated", "results/all results/all --json"), ANALYSIS),
    Verb("paper", LOOK, "a folder with PDF figures, LaTeX tables, CSV, methods text and environment",
         ("results/gpt2-torch-cuda", "results/gpt2-torch-cuda --out paper", "results/gpt2-fsdp2-cuda --ranks mean",
          "rows.csv --out paper"), ANALYSIS),
    Verb("export", LOOK, "the tidy table as CSV or Parquet; also of a foreign file",
         ("results/gpt2-torch-cuda rows.parquet", "results/gpt2-torch-cuda rows.csv",
          "results/gpt2-fsdp2-cuda rows.csv --ranks mean",
          "theirs.csv ours.csv --columns seq_len,peak_reserved_mib --set model=gpt2"), ANALYSIS),
    Verb("doctor", ABOUT, "is this machine fit for a sweep, and what device=auto and sweep=auto mean here",
         ("", "--results /data/results", "--json"), HARNESS, "something is a problem"),
    Verb("gpus", ABOUT, "the GPUs that device.gpu can name: memory, capability, peaks", ("", "--json"), HARNESS),
    Verb("techniques", ABOUT, "settings that trade memory, time or exactness: what each needs, how far it is proven",
         ("", "optimizer", "--json"), HARNESS),
    Verb("columns", ABOUT, "what the columns of a row mean, its outcomes and flags", ("", "--json"), HARNESS),
    Verb("help", ABOUT, "this, or what VERB --help says", ("", "sweep"), FRONT),
)  # fmt: skip
BY_NAME = {verb.name: verb for verb in VERBS}
ALIASES = {"cards": "gpus"}  # names of before
START = (
    "  vramsweep predict model=llama3-8b sharding=fsdp2 world_size=8 seq_len=4096  # fits on 8 GPUs?",
    "  vramsweep explain model=gpt2 seq_len=512                                    # what takes memory?",
    "  vramsweep sweep model=gpt2 seq_len=256,512,1024   # measures; without a GPU predicts an H100",
)
INTERNAL = ("errors", "draw")  # of the analysis: validate, timeline and replay start them; in no help, and may change


def overview() -> str:
    """What `vramsweep --help` prints: the verbs in their sections, and what exit statuses mean."""
    parts = ["usage: vramsweep VERB [ARGUMENT ...]"]
    for section in SECTIONS:
        lines = [f"  {verb.name:<12}{verb.line}" for verb in VERBS if verb.section == section]
        parts.append("\n".join([section, *lines]))
    statuses = [_filled(f"  {number:<4}", meaning) for number, meaning in STATUSES.items()]
    parts.append("\n".join(["Exit status", *statuses]))
    parts.append("vramsweep VERB --help tells more, --help-all has every setting; --version prints the version")
    parts.append("\n".join(["Start here", *START]))
    return "\n\n".join(parts) + "\n"


def _filled(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{head} ", subsequent_indent="    ")
