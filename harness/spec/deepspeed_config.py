"""A user's ds_config.json: its values, contradictions to a trial's axes, and values for axes that are left alone.

Values that a file leaves out, or leaves to the Trainer ("auto"), come from the axes. All others must agree with them.
Whether DeepSpeed knows a file's other keys is checked where DeepSpeed is (runners/shardings/zero_config.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramsweep.harness.files import bounded_reads, plain_json
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec.techniques.schema import text

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

AUTO = "auto"
MOST = 1 << 24  # most bytes of a file
STAGE = "zero_optimization.stage"
MICRO, ACCUM, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
BF16, FP16 = ("bf16.enabled", "bfloat16.enabled"), ("fp16.enabled",)  # by today's names and former ones
OFFLOADS = {axis: f"zero_optimization.{axis}.device" for axis in ("offload_optimizer", "offload_param")}
OFFLOADED_ONCE = {axis: f"zero_optimization.cpu_{axis.removesuffix('_optimizer')}" for axis in OFFLOADS}
# DeepSpeed's mixed precisions that no value of the axis precision means
OTHERS = ("amp.enabled", "torch_autocast.enabled")

# Keys whose values DeepSpeed or the Trainer reads as objects
OBJECTS = (*(key.rpartition(".")[0] for key in (*BF16, *FP16, *OFFLOADS.values())), "optimizer", "scheduler")

# Keys by which ranks would divide more than the batch
PARALLEL = ("tensor_parallel.autotp_size", "sequence_parallel_size")


# Every key that an axis sets: the axis, and the value that it requires (None: one that no ds_config can give).
OWNED: dict[str, tuple[str, Callable[[Trial], Any]]] = {
    STAGE: ("sharding", lambda trial: int(n) if (n := trial.sharding.removeprefix("zero")).isdigit() else None),
    OFFLOADS["offload_optimizer"]: ("offload_optimizer", lambda trial: "cpu" if trial.offload_optimizer else "none"),
    OFFLOADS["offload_param"]: ("offload_param", lambda trial: "cpu" if trial.offload_param else "none"),
    OFFLOADED_ONCE["offload_optimizer"]: ("offload_optimizer", lambda trial: trial.offload_optimizer),
    OFFLOADED_ONCE["offload_param"]: ("offload_param", lambda trial: trial.offload_param),
    **dict.fromkeys(BF16, ("precision", lambda trial: trial.precision == "bf16")),
    **dict.fromkeys(FP16, ("precision", lambda trial: trial.precision == "fp16")),
    **dict.fromkeys(OTHERS, ("precision", lambda trial: False)),
    MICRO: ("micro_batch", lambda trial: trial.micro_batch),
    ACCUM: ("grad_accum", lambda trial: trial.grad_accum),
    BATCH: ("micro_batch, grad_accum and world_size", lambda trial: trial.samples_per_step()),
}


def read(path: str) -> dict[str, Any]:
    """Return the file's object. Raises UserError if it is missing, unreadable or holds something else."""
    try:
        found = plain_json.read(bounded_reads.read_content(Path(path), MOST).decode(), object_pairs_hook=_once)
    except FileNotFoundError:
        raise UserError(f"ds_config {path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"ds_config {path} cannot be read: {bounded_reads.error_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"ds_config {path} cannot be read as JSON: {error!s:.200}") from None
    if not isinstance(found, dict):
        raise UserError(f"ds_config {path} holds {json.dumps(found)[:40]}; it must be one object, {{...}}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs. Raises ValueError for a repeated key, as DeepSpeed does for a file."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice} occurs twice")
    return found


def stated_values(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if it is missing or left to the axes."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value == AUTO else value


def _no_object(config: Mapping[str, Any], key: str) -> str | None:
    """Return, as JSON, the value that stands in place of an object; None if it is an object or missing."""
    before, _, last = key.rpartition(".")
    node = stated_values(config, before) if before else config
    found = node.get(last, {}) if isinstance(node, Mapping) else {}
    return None if isinstance(found, Mapping) else json.dumps(found)


def axes(config: Mapping[str, Any], world_size: int = 1) -> dict[str, Any]:
    """Return the file's values of the axes, by axis, without those that it leaves out or has wrong."""
    micro, accum, batch = (stated_values(config, key) for key in (MICRO, ACCUM, BATCH))
    whole = isinstance(micro, int) and isinstance(batch, int) and isinstance(world_size, int)
    if accum is None and whole and micro * world_size > 0:
        accum = batch // (micro * world_size) or None  # as DeepSpeed computes it
    found = {
        "micro_batch": micro,
        "grad_accum": accum,
        "precision": _precision(config),
        "sharding": next((f"zero{stage}" for stage in range(4) if stage == stated_values(config, STAGE)), None),
        "optimizer": adam(config),
        **{axis: _offloads(config, axis) for axis in OFFLOADS},
    }
    return {axis: value for axis, value in found.items() if value is not None}


def adam(config: Mapping[str, Any]) -> str | None:
    """Return the axis's name of the file's Adam (deepspeed/runtime/engine.py: get_optimizer_configuration).

    None if the file has no optimizer, or another one, which the axis lacks.
    """
    if str(stated_values(config, "optimizer.type")).lower() not in ("adam", "adamw"):
        return None
    if stated_values(config, "optimizer.params.torch_adam"):
        return "adamw_torch"
    return "deepspeed_cpu_adam" if _offloads(config, "offload_optimizer") else "deepspeed_fused_adam"


def _offloads(config: Mapping[str, Any], axis: str) -> bool | None:
    device, once = stated_values(config, OFFLOADS[axis]), stated_values(config, OFFLOADED_ONCE[axis])
    return bool(once) if device is None and once is not None else None if device is None else device == "cpu"


def _precision(config: Mapping[str, Any]) -> str | None:
    half = {"bf16": BF16, "fp16": FP16}
    told = {name: [v for key in keys if (v := stated_values(config, key)) is not None] for name, keys in half.items()}
    on = [name for name, values in told.items() if any(values)]
    return on[0] if on else "fp32" if all(told.values()) else None


def contradictions(trial: Trial, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages on values of the file that contradict the trial's axes (naming both), or are not supported."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or "stage" not in zero:
        yield (
            f"it has no {STAGE}, which DeepSpeed reads as 0 and the Trainer refuses; add it: 0 to 3, or "
            f'"{AUTO}" to follow sharding='
        )
    elif zero["stage"] not in (0, 1, 2, 3, AUTO) or isinstance(zero["stage"], bool):
        yield f'{STAGE} is {json.dumps(zero["stage"])}; it must be 0 to 3, or "{AUTO}" to follow sharding='
    for key in OBJECTS:
        if (found := _no_object(config, key)) is not None:
            yield f"{key} is {found}; it must be an object, {{...}}, or be left out"
    if all(any(stated_values(config, key) for key in keys) for keys in (BF16, FP16)):
        yield "bf16 and fp16 are both enabled; enable one of them"
    for key in OTHERS:
        if stated_values(config, key):
            yield f"{key} is true, which is not a value of precision=; use bf16.enabled or fp16.enabled instead"
    clipping = stated_values(config, "gradient_clipping")
    if clipping is not None and (isinstance(clipping, bool) or not isinstance(clipping, (int, float))):
        yield f"gradient_clipping is {json.dumps(clipping)}; it must be a number"
    for key in PARALLEL:
        if stated_values(config, key) not in (None, 0, 1):
            stated = json.dumps(stated_values(config, key))
            yield f"{key} is {stated}, which is not supported, because ranks divide only the batch; use 1"
    for key in OFFLOADS.values():
        if stated_values(config, key) == "nvme":
            yield (
                f"{key} is nvme, which is not supported, because its buffers and speed depend on the drive and the aio "
                'settings, which no row describes; use "cpu"'
            )
    optimizer, own = stated_values(config, "optimizer"), adam(config)
    if isinstance(optimizer, Mapping) and not isinstance(stated_values(config, "optimizer.type"), str):
        yield f'optimizer is {json.dumps(optimizer)}; it must be {{"type": NAME, "params": {{...}}}}'
    if optimizer is not None and trial.optimizer != (own or "default"):
        yield _disagree(trial, "optimizer", optimizer, "optimizer", None)
    for key, (axis, asked) in OWNED.items():
        value, wanted = stated_values(config, key), asked(trial)
        if value is not None and value != wanted:
            yield _disagree(trial, key, value, axis, wanted)


def _disagree(trial: Trial, key: str, value: Any, axis: str, wanted: Any) -> str:
    if isinstance(wanted, bool) and not isinstance(value, bool):
        return f"{key} is {json.dumps(value)}; it must be true or false"
    names = axis.replace(" and ", ", ").split(", ")
    given = " ".join(f"{name}={text(getattr(trial, name))}" for name in names)
    there = "" if wanted is None else f" (that is, {json.dumps(wanted)})"
    mend = "make them agree" if names[1:] else f"leave {axis} out to use the file's value"
    return f'{key} is {json.dumps(value)}, which contradicts {given}{there}; {mend}, or write "{AUTO}" in the file'
