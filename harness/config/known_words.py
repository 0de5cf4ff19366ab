"""Names as people type them, and what surely is none: refused here, before anything heavy is imported.

Not covered: what a setting can be, and flags (typed_words.py), which looks at everything again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from vramsweep.harness.config import conf_files
from vramsweep.harness.files import redaction
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError

_ALIASES = """
adapter=lora           lora=true
adapter=none           lora=false
attention              attn_implementation
checkpointing=full     checkpointing=true
checkpointing=none     checkpointing=false
compile=default        compile=true
compile=none           compile=false
device.gpu             gpu
grad_accum             gradient_accumulation_steps
lora_r                 lora_rank
micro_batch            batch batch_size bs mbs micro_batch_size per_device_train_batch_size
model                  model_name_or_path
optimizer              optim
precision              dtype torch_dtype
precision=bf16         bf16=true precision=bfloat16
precision=fp16         fp16=true precision=float16 precision=half
precision=fp32         precision=float32
quantization=nf4       load_in_4bit=true
seq_len                block_size context_length max_length max_seq_len max_seq_length seq_length seqlen sequence_length
sharding               zero zero_stage
sharding=zero0         sharding=0 sharding=zero-0
sharding=zero1         sharding=1 sharding=zero-1
sharding=zero2         sharding=2 sharding=zero-2
sharding=zero3         sharding=3 sharding=zero-3
world_size             gpus n_gpus ngpus nproc_per_node num_gpus num_processes
"""
# What other tools call a setting, or one value of it, and what it is here: accepted, and said.
ALIASES = {alias: row.split()[0] for row in _ALIASES.strip().splitlines() for alias in row.split()[1:]}
# What is no setting, and where it is found.
ELSEWHERE = {
    "dry_run": "`vramsweep plan` with the same words shows what would run",
    **dict.fromkeys(("epochs", "max_steps", "num_steps", "steps"), "protocol.measured_steps=N are the steps measured"),
}
_PLAIN = re.compile(r"[\w.,:* -]+")  # neither quotes nor brackets


@cache
def setting_names() -> frozenset[str]:
    """Return every setting and group of conf/, and one name of before."""
    return conf_files.written_defaults().keys() | set(conf_files.chosen_options()) | {"gradient_checkpointing"}


@cache
def all_names() -> frozenset[str]:
    """Return every name that is understood, those of other tools included."""
    return setting_names() | {name.partition("=")[0] for name in ALIASES}


def find_name(typed: str) -> str | None:
    """Return the name that is meant, in any case and with dashes; None for no such."""
    plain = typed.replace("-", "_")
    return next((name for name in (typed, plain, plain.casefold()) if name in all_names()), None)


def describe_unknown(typed: str, said: str, prog: str, flags: Mapping[str, str]) -> str:
    """Say what was probably meant by a name that is no setting; `flags` are the verb's own, by their names."""
    name = typed.replace("-", "_").casefold()
    if name in ELSEWHERE:
        return f"{said}; {ELSEWHERE[name]}"
    near = str(suggestions.find_closest(name, [*flags, *sorted(all_names())]))
    meant = flags.get(near) or ALIASES.get(f"{near}=true") or ALIASES.get(near, near)
    guess = "" if meant == "None" else f" did you mean {meant}?"
    return f"{said};{guess} {prog} --help-all lists what can be set"


def refuse_unknown(prog: str, typed: Sequence[str]) -> None:
    """Raise UserError for a setting, an option of a group or a GPU that conf/ and the table of GPUs do not know.

    Whatever may be known elsewhere is left alone: with files of the user's own, in quotes, of the command behind `--`.
    """
    at = typed.index("--") if "--" in typed else len(typed)
    command = " ".join(typed[at:])
    if said := redaction.secrets_problem(list(typed[:at])):
        raise UserError(said)
    if any(word.partition("=")[0] in ("-cd", "--config-dir") for word in typed[:at]):
        return
    for before, word, after in zip(["", *typed], typed[:at], [*typed[1:at], ""], strict=False):
        key, equals, text = word.partition("=")
        if not equals and not before.startswith("-"):
            _refuse_bare(word, after)
        if not command and key.startswith("--") and (name := key[2:].replace("-", "_")) in ELSEWHERE:
            raise UserError(describe_unknown(name, f"unrecognized arguments: {key}", prog, {}))
        if after and "=" not in after and (word + after)[len(word) - 1 : len(word) + 1].count(","):
            raise UserError(f"{word} {after}: no space at a comma; write {word}{after}")
        if not equals or not re.fullmatch(r"[\w.]+", key) or f"{{{key}" in command:
            continue
        name = find_name(key)
        if name is None and "." not in key:
            said = describe_unknown(key, f"{word}: there is no setting {key!r}", prog, {})
            if "did you mean" in said or key.casefold() in ELSEWHERE:
                raise UserError(said)
        if name is not None and _PLAIN.fullmatch(text):
            for item in map(str.strip, text.split(",")):
                _refuse_value(word, ALIASES.get(name, name), item)


def _refuse_bare(word: str, after: str) -> None:
    """Raise UserError for the name of a setting without its value, where what follows is one."""
    name = None if word.startswith("-") or Path(word).exists() else find_name(word)
    if name and after and not re.match(r"-{1,2}[A-Za-z]", after) and "=" not in after:
        raise UserError(f"{word} {after}: settings are given as KEY=VALUE; write {name}={after}")


def refuse_number(word: str, item: str) -> None:
    """Raise UserError for a range or a number as other tools write it: 1-1024, 64:128, 2k."""
    if found := re.fullmatch(r"(\d+)[-:](\d+)(:\d+)?", item):
        write = f"{found[1]}..{found[2]}{found[3] or ''}"
        raise UserError(f"{word}: a range is FIRST..LAST or FIRST..LAST:STEP; write {write}")
    if found := re.fullmatch(r"(\d+)k", item, re.IGNORECASE):
        raise UserError(f"{word}: a whole number has no unit; write {int(found[1]) * 1024} (or {found[1]}000)")


def _refuse_value(word: str, key: str, item: str) -> None:
    if f"{key}={item.casefold()}" in ALIASES or item == "null":
        return
    if conf_files.written_defaults().get(key, "").isdigit():
        refuse_number(word, item)
    if key == "device.gpu":
        from vramsweep.harness.spec import gpu_names  # and the table of GPUs

        if gpu_names.find_name(item) is None:
            raise UserError(gpu_names.unknown_gpu(word, item))
    if key in conf_files.chosen_options() and key not in conf_files.IN_TABLES:
        names = [*conf_files.file_names(key), *(["auto"] if key in conf_files.AUTO else [])]
        own = key == "model" and (Path(item).exists() or Path(item).name == "config.json")
        if not own and item.casefold() not in (name.casefold() for name in names):
            raise UserError(suggestions.unknown_option(key, item, names))
