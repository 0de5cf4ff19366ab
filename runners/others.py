"""What other tools say that a trial needs, in bytes on one card: for the table that has our own errors beside theirs.

Each is run as its documentation says, from the trial's settings and a model without memory; None where it has nothing
to say about such a run. `python -m vramsweep.runners.others REQUEST ANSWERS`: REQUEST is JSON with `trials` by id, and
`tracked`, the ids that torch's MemTracker, which takes minutes, is to run; ANSWERS gets a line a trial as it is done.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vramsweep.harness import registry
from vramsweep.harness.registry import FSDP, ZERO
from vramsweep.harness.trial import Trial
from vramsweep.runners import build, masks, techniques
from vramsweep.runners.cuda_like import behave
from vramsweep.runners.tracer import at_once, forked

DEADLINE_S = 240.0  # for all that others say of one trial
_BYTES = {"bf16_pure": 2, "bf16_master": 2}  # of a weight where it is not 4


@dataclass(frozen=True)
class Model:
    """What the rules of thumb go by: numbers of parameters, and the model itself on meta, where we can make it."""

    parameters: int
    trainable: int
    net: Any = None


@dataclass(frozen=True)
class Other:
    """`estimate` is asked about a trial; `source` says where the rule or the tool is described."""

    name: str
    source: str
    estimate: Callable[[Trial, Model], int | None]


def _shared(trial: Trial, weights: float, gradients: float, state: float) -> float:
    """Bytes of weights, gradients and optimizer state that a rank holds of what is divided among all."""
    n = trial.world_size
    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp1": 3, "fsdp2": 3}.get(trial.sharding, 0)
    state = 0 if trial.offload_optimizer or trial.offload_param else state
    return weights / (n if stage > 2 else 1) + gradients / (n if stage > 1 else 1) + state / (n if stage else 1)


def sixteen(trial: Trial, model: Model) -> int | None:
    """2 bytes a weight, 2 a gradient, 12 for Adam and the fp32 copy: of those trained; 2 for each frozen weight."""
    frozen, trained = model.parameters - model.trainable, model.trainable
    return round(_shared(trial, 2 * (frozen + trained), 2 * trained, 12 * trained))


def eighteen(trial: Trial, model: Model) -> int | None:
    """6 bytes a weight (mixed precision keeps two copies), 4 a gradient, 8 for Adam's state."""
    frozen, trained = model.parameters - model.trainable, model.trainable
    return round(_shared(trial, 2 * frozen + 6 * trained, 4 * trained, 8 * trained))


_STATE = {"sgd": 0.0, "sgd_momentum": 4.0, "adafactor": 0.0, "lion_32bit": 4.0, "lion_8bit": 1.0,
          "paged_lion_8bit": 0.0,
          "adamw_bnb_8bit": 2.0, "adamw_torch_8bit": 2.0, "adamw_torch_4bit": 1.0, "paged_adamw_8bit": 0.0,
          "paged_adamw_32bit": 0.0}  # fmt: skip


def states(trial: Trial, model: Model) -> int | None:
    """Weights and gradients in the precision's dtype, and what the optimizer keeps of each, as its page says."""
    size = _BYTES.get(trial.precision, 4)
    half = trial.sharding in ZERO and trial.precision in ("bf16", "fp16")
    size = 2 if half else size
    state = _STATE.get(trial.optimizer, 2.0 * size) + (4 if trial.precision == "bf16_master" else 0)
    state = 12.0 if half else state
    frozen = {"none": float(size), "nf4": 0.56, "nf4_double": 0.52, "gptq": 0.52}[trial.quantization]
    trained = model.trainable
    weights = frozen * (model.parameters - trained) + size * trained
    return round(_shared(trial, weights, size * trained, state * trained))


def accelerate(trial: Trial, model: Model) -> int | None:
    """`accelerate estimate-memory`, training with Adam: the largest of its parts; of one card, all weights trained."""
    if model.net is None or trial.world_size > 1 or model.trainable != model.parameters:
        return None
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model.net)
    precision = {"fp32": "float32", "tf32": "float32", "fp16": "float16"}.get(trial.precision, "bfloat16")
    return int(max(estimate_training_usage(total, precision).values()))


def deepspeed(trial: Trial, model: Model) -> int | None:
    """DeepSpeed's estimate_zero2/3_model_states_mem_needs."""
    if trial.sharding not in ("zero2", "zero3"):
        return None
    per_node = min(trial.world_size, trial.device.gpus_per_node)
    nodes = -(-trial.world_size // per_node)
    where = {"num_gpus_per_node": per_node, "num_nodes": nodes, "cpu_offload": trial.offload_optimizer}
    if trial.sharding == "zero2":
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        return int(estimate_zero2_model_states_mem_needs(model.parameters, **where)[1])
    if model.net is None:
        return None
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.net.modules())
    found = estimate_zero3_model_states_mem_needs(
        model.parameters, largest, cpu_offload_params=trial.offload_param, zero_init=trial.zero_init, **where
    )
    return int(found[1])


def training_hub(trial: Trial, model: Model) -> int | None:
    """Red Hat's training_hub, its middle estimate for supervised fine-tuning, where the package is installed."""
    if model.net is None or trial.adapter != "none" or not hasattr(model.net, "config"):
        return None
    package = importlib.util.find_spec("training_hub")
    if package is None or not package.submodule_search_locations:
        return None
    place = Path(package.submodule_search_locations[0]) / "profiling" / "memory_estimator.py"
    spec = importlib.util.spec_from_file_location("training_hub_estimator", place)  # alone: the rest wants its trainers
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    for name in ("mini_trainer", "mini_trainer.osft_utils"):  # of which another of its estimators wants a table
        sys.modules.setdefault(name, types.ModuleType(name)).MODEL_CONFIGS = []  # type: ignore[attr-defined]
    spec.loader.exec_module(module)

    class Local(module.BasicEstimator):  # type: ignore[misc, name-defined]
        def _load_model(self, warn: str, trust_remote_code: bool = False) -> None:
            self.model = model.net
            self.num_params, self.num_trainable_params = model.parameters, model.trainable
            self.num_layers, self.hidden_size = model.net.config.num_hidden_layers, model.net.config.hidden_size

        def _update_model_storage(self) -> None:
            """Nothing is kept."""

    asked = Local(
        num_gpus=trial.world_size, model_path=f"local-{trial.model.name}", max_seq_len=trial.seq_len, verbose=0,
        batch_size=trial.micro_batch * trial.world_size, use_liger=trial.kernels == "liger",
    )  # fmt: skip
    return int(asked.estimate()[1])


class _Meter:
    """Takes a runner's calls; MemTracker has to be told to begin anew after each step."""

    rank = 0

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def built(self, *_: Any) -> None: ...

    def step_begin(self) -> None: ...

    def fed(self, batch: Any) -> None: ...

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        self._tracker.reset_mod_stats()


def mem_tracker(trial: Trial, model: Model) -> int | None:
    """torch's MemTracker on two fake steps of the plain loop (of a custom target: its own), with CUDA's kernels."""
    from torch.distributed._tools.mem_tracker import MemTracker

    if trial.sharding not in ("none", "ddp", *FSDP):
        return None
    name = trial.runner.name if trial.runner.name == "custom" else "torch"
    steps = trial.protocol.model_copy(update={"warmup_steps": 1, "measured_steps": 1})
    one = trial.model_copy(update={"protocol": steps, "runner": trial.runner.model_copy(update={"name": name})})
    runner = importlib.import_module(registry.runner(name).module)
    build.prepare(one)
    with contextlib.ExitStack() as stack:
        stack.enter_context(behave(one.device.card.capability))
        stack.enter_context(masks.known(one))
        stack.enter_context(techniques.around(one, torch.device("cpu")))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracker = stack.enter_context(MemTracker())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        runner.run(one, torch.device("cpu"), _Meter(tracker), Path(folder))
        peak = tracker.get_tracker_snapshot("peak")
    return next((int(found["Total"]) for device, found in peak.items() if device.type == "cpu"), None)


MEM_TRACKER = "torch MemTracker"
OTHERS = (
    Other("16 bytes a parameter", "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1", sixteen),
    Other("18 bytes a parameter", "Hugging Face, Model training anatomy", eighteen),
    Other("weights, gradients, optimizer state", "what each optimizer's documentation says", states),
    Other("accelerate estimate-memory", "accelerate.commands.estimate", accelerate),
    Other("DeepSpeed estimate_zero", "deepspeed.runtime.zero: estimate_zero2/3_model_states_mem_needs", deepspeed),
    Other("training_hub", "Red Hat training_hub, profiling.memory_estimator.BasicEstimator", training_hub),
    Other(MEM_TRACKER, "torch.distributed._tools.mem_tracker", mem_tracker),
)


def asked(trial: Trial, parameters: int, trainable: int, tracked: bool) -> dict[str, int | None]:
    """What each says; one that fails says nothing, and its error is in the log."""
    net = None
    if trial.runner.name != "custom":
        plain = trial.model_copy(
            update={"adapter": "none", "quantization": "none", "sharding": "none", "kernels": "none"}
        )
        with contextlib.suppress(Exception):
            net = build.model(plain, torch.device("meta"))
    model = Model(parameters, trainable, net)
    found: dict[str, int | None] = {}
    for other in OTHERS:
        if other.name == MEM_TRACKER and not tracked:
            continue
        try:
            found[other.name] = other.estimate(trial, model)
        except Exception:
            traceback.print_exc()
            found[other.name] = None
    return found


def _answer(trial_id: str, values: dict[str, Any], tracked: bool, answers: Path) -> None:
    trial = Trial.model_validate(values["trial"])
    for more in (False, True) if tracked else (False,):  # the second may not come to an end
        said = asked(trial, values["parameters"], values["trainable"], more)
        with answers.open("a") as lines:
            lines.write(json.dumps({"trial_id": trial_id, "tracked": more, "others": said}) + "\n")


def main(request: Path, answers: Path) -> None:
    """Answer one request."""
    wanted = json.loads(request.read_text())
    with answers.open("a") as lines:
        lines.write(json.dumps({"sources": {other.name: other.source for other in OTHERS}}) + "\n")
    jobs = [
        (partial(_answer, trial_id, values, trial_id in wanted["tracked"], answers), DEADLINE_S)
        for trial_id, values in wanted["trials"].items()
    ]
    for _ in forked(jobs, at_once()):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
