"""Names as people type them, and what each can be, from conf/ and the tables: light, as a mistyped word is refused
before anything heavy is imported.

Not covered: flags, ranges and models (typed_words.py), which values go together (trial_rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from vramsweep.harness.config import conf_files
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec import runner_table, shardings
from vramsweep.harness.spec.techniques import catalog

_ALIASES = """
adapter=lora           lora=true
adapter=none           lora=false
allocator=expandable   allocator=expandable_segments expandable_segments=true
allocator=max_split_128     max_split_size_mb=128
allocator=max_split_512     max_split_size_mb=512
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
optimizer=adamw_torch        optimizer=adamw
optimizer=adamw_torch_fused  optimizer=adamw_fused
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
    **dict.fromkeys(("learning_rate", "lr", "warmup_steps", "weight_decay"), "neither memory nor speed depends on it"),
    **dict.fromkeys(
        ("expandable_segments", "garbage_collection_threshold", "max_split_size_mb", "roundup_power2_divisions"),
        "any setting of the allocator: allocator=custom 'allocator.conf=\"NAME:VALUE,NAME:VALUE\"'",
    ),
}


@cache
def setting_names() -> set[str]:
    """Return every setting and group of conf/, and one name of before."""
    return conf_files.written_defaults().keys() | set(conf_files.chosen_options()) | {"gradient_checkpointing"}


@cache
def all_names() -> set[str]:
    """Return every name that is understood, those of other tools included."""
    return setting_names() | {name.partition("=")[0] for name in ALIASES}


def find_name(typed: str) -> str | None:
    """Return the name that is meant, in any case and with dashes; None for no such."""
    plain = typed.replace("-", "_")
    return next((name for name in (typed, plain, plain.casefold()) if name in all_names()), None)


@cache
def list_options(key: str) -> tuple[str, ...]:
    """Return what a group or a setting can be, where files of conf/ or a table say it; else nothing."""
    if key == "device.gpu":
        return tuple(gpu.name for gpu in gpu_lookup.GPUS)
    files = conf_files.file_names(key) if key in conf_files.chosen_options() else []
    in_table = [one.name for one in runner_table.RUNNERS] if key == "runner" else catalog.values(key)
    named = shardings.NAMES if key == "sharding" else in_table
    return tuple(dict.fromkeys([*files, *map(catalog.text, named), *(["auto"] if key in conf_files.AUTO else [])]))


def describe_unknown(typed: str, said: str, prog: str, flags: Mapping[str, str]) -> str:
    """Say what was probably meant by a name that is no setting; `flags` are the verb's own, by their names."""
    name = typed.replace("-", "_").casefold()
    if name in ELSEWHERE:
        return f"{said}; {ELSEWHERE[name]}"
    near = str(suggestions.find_closest(name, [*flags, *sorted(all_names())]))
    meant = flags.get(near) or ALIASES.get(f"{near}=true") or ALIASES.get(near, near)
    guess = "" if meant == "None" else f" did you mean {meant}?"
    return f"{said};{guess} {prog} --help-all lists what can be set"
