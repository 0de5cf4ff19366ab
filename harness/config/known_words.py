"""Names as people type them, and what each can be, from conf/ and the tables: light, as a mistyped word is refused
before anything heavy is imported.

Not covered: flags, ranges and models (typed_words.py), which values go together (trial_rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from vramsweep.harness.config import conf_files
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec import runner_table, shardings
from vramsweep.harness.spec.techniques import catalog

_ALIASES = """
adapter=lora lora=true use_lora=true use_peft=true; adapter=none lora=false use_lora=false use_peft=false
allocator=expandable allocator=expandable_segments expandable_segments=true; allocator=default expandable_segments=false
allocator=max_split_128 max_split_size_mb=128; allocator=max_split_512 max_split_size_mb=512
attention attn_implementation; attention=sdpa flash_attention=false flash_attn=false use_flash_attention_2=false
attention=flash_attention_2 attention=fa2 flash_attention=true flash_attn=true use_flash_attention_2=true
checkpointing activation_checkpointing enable_activation_checkpointing gradient_checkpointing
checkpointing=full checkpointing=true; checkpointing=none checkpointing=false
compile torch_compile; compile=default compile=true; compile=none compile=false
device=cpu no_cuda=true use_cpu=true; device=cuda device=cuda:0 device=gpu; device.gpu gpu
device.memory_gib gpu_memory vram; ds_config deepspeed deepspeed_config; grad_accum gradient_accumulation_steps
kernels=liger use_liger_kernel=true; kernels=none use_liger_kernel=false; lora_r lora_rank
micro_batch batch batch_size bs mbs micro_batch_size per_device_train_batch_size
model base_model model_id model_name model_name_or_path; offload_param fsdp_cpu_offload fsdp_offload_params
optimizer optim; optimizer=adamw_torch optimizer=adamw; optimizer=adamw_torch_fused optimizer=adamw_fused
packing=none packing=false; precision dtype mixed_precision torch_dtype; precision=tf32 tf32=true
precision=bf16 bf16=true precision=bf16-mixed precision=bfloat16
precision=fp16 fp16=true precision=16-mixed precision=float16 precision=half
precision=fp32 bf16=false fp16=false precision=float32 precision=no tf32=false
quantization=nf4 load_in_4bit=true; quantization=none load_in_4bit=false load_in_8bit=false
seq_len block_size context_length ctx cutoff_len max_length max_seq_len max_seq_length n_ctx seq_length seqlen \
sequence_len sequence_length; sharding fsdp_sharding_strategy sharding_strategy strategy zero zero_stage
sharding=zero2 zero2=true; sharding=zero3 zero3=true
world_size gpus n_gpus ngpus nproc_per_node num_gpus num_processes
"""
# What other tools call a setting, or one value of it, and what it is here: accepted, and said; a line may have several.
ALIASES = {alias: row.split()[0] for row in re.split("[;\n]", _ALIASES.strip()) for alias in row.split()[1:]}
_ELSEWHERE = """
`vramsweep plan` with the same words shows what would run: dry_run
write adapter=lora quantization=nf4: qlora
write sharding=fsdp2 (or fsdp1): fsdp full_shard use_fsdp
write sharding=fsdp2 +runner.options.reshard_after_forward=false: shard_grad_op
write sharding=fsdp2 offload_param=true, or with DeepSpeed's zero1 to zero3 offload_optimizer=true: cpu_offload
tensor, pipeline and sequence parallelism are not covered; sharding= divides the work: context_parallel_size \
pipeline_parallel_size sequence_parallel_degree sequence_parallel_size tensor_parallel tensor_parallel_size tp tp_size
write price_per_hour=PRICE, of the whole node: cost_per_hour price
predict --max-reserved SIZE, or a GPU with less: device.memory_gib=GIB: max_memory max_memory_mb max_memory_per_gpu
there are no 8-bit weights here; `vramsweep techniques quantization` lists what there is: load_in_8bit
results=DIR is the folder of all sweeps, name=NAME the folder of this one in it: output_dir
did you mean protocol.warmup_steps? Those are not timed; a learning rate's change neither memory nor speed: warmup_steps
it is the product of micro_batch, grad_accum and world_size; give these: global_batch_size total_batch_size
data=FILE or data=NAME of the hub, with model=ORG/NAME for its tokenizer: data_path dataset dataset_name train_file
a model's own: model.config.NAME=VALUE, as its config.json has it: hidden_size n_layer num_hidden_layers num_layers
protocol.measured_steps=N are the steps measured: max_steps num_steps steps
the Trainer has it: runner=trainer +runner.options.NAME=VALUE: label_smoothing_factor max_grad_norm weight_decay
world_size=N counts the GPUs of all nodes, device.gpus_per_node=N those of one: nnodes num_machines num_nodes
any setting of the allocator: allocator=custom 'allocator.conf="NAME:VALUE,NAME:VALUE"': expandable_segments \
garbage_collection_threshold max_split_size_mb pytorch_alloc_conf pytorch_cuda_alloc_conf roundup_power2_divisions
left out: adam_beta1 adam_beta2 adam_epsilon do_eval do_train epochs eval_batch_size eval_steps eval_strategy \
evals_per_epoch evaluation_strategy hub_model_id learning_rate load_best_model_at_end log_every_n_steps logging_dir \
logging_first_step logging_steps logging_strategy lr lr_scheduler lr_scheduler_type num_epochs num_train_epochs \
overwrite_output_dir per_device_eval_batch_size push_to_hub report_to run_name save_safetensors save_steps \
save_strategy save_total_limit saves_per_epoch val_set_size wandb_project warmup_ratio disable_tqdm log_level max_epochs
"""
# What is no setting, and where it is found; or left out, as neither memory nor speed of a step depends on it.
ELSEWHERE = {n: row.rpartition(": ")[0] for row in _ELSEWHERE.splitlines() for n in row.rpartition(": ")[2].split()}
LEFT_OUT = frozenset(name for name, why in ELSEWHERE.items() if why == "left out")


@cache
def setting_names() -> set[str]:
    """Return every setting and group of conf/."""
    return conf_files.written_defaults().keys() | set(conf_files.chosen_options())


@cache
def all_names() -> set[str]:
    """Return every name that is understood, those of other tools included."""
    return setting_names() | {name.partition("=")[0] for name in ALIASES} | LEFT_OUT


def find_name(typed: str) -> str | None:
    """Return the name that is meant, in any case and with dashes; None for no such."""
    plain = typed.replace("-", "_")
    return next((name for name in (typed, plain, plain.casefold()) if name in all_names()), None)


def find_model(typed: str) -> str | None:
    """Return the one built-in model of this name, or that the hub calls so, whatever its case, dashes and dots."""
    of_hub = {hub_id.rpartition("/")[2]: name for hub_id, name in conf_files.hub_ids().items()}
    names = {name: name for name in conf_files.file_names("model")} | of_hub
    parts, *each = ([*re.findall(r"\d+(?:\.\d+)?b|\d+|[a-z]+", one.casefold())] for one in (typed, *names))
    found = {name for name, its in zip(names.values(), each, strict=True) if its == parts and "/" not in typed}
    return found.pop() if len(found) == 1 else None


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
