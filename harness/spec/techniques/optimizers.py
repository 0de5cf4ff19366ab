"""How weights are updated: the optimizer, and when ranks average gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.shardings import DDP, ZERO
from vramsweep.harness.spec.techniques.schema import H100, H200, Axis, Package, Technique

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

AXES = (
    Axis("optimizer", str, "default", "optimizer as asked for, mostly by its name in TrainingArguments (optim)"),
    Axis("no_sync", bool, True, "gradients are averaged with the last of the accumulated passes only (ddp)"),
)

_TORCH = ".techniques.torch_optimizers"
BITSANDBYTES = (Package("bitsandbytes", "0.44"),)  # blocks of 2,048 elements before
TORCHAO = (Package("torchao", "0.11"),)  # torchao.optim; prototypes before
NO_DTENSOR = (("sharding", ("fsdp2",), "it does not take FSDP2's sharded tensors (DTensor); use optimizer=adamw_torch, "
               "or sharding=zero2"),)  # fmt: skip
NOT_PAGED = (("device", ("cpu",), "bitsandbytes pages nothing there; use the optimizer of that name without paged"),
             ("offload_optimizer", (True,), "what is offloaded steps in host memory, where nothing is paged; leave one "
              "of them out"))  # fmt: skip


def _fused_under_deepspeed(trial: Trial) -> Iterator[str]:
    if trial.runner.name == "deepspeed" and trial.device.name == "cpu":
        yield "optimizer adamw_torch_fused with deepspeed needs CUDA; on device=cpu use adamw_torch"


def _accumulating(trial: Trial) -> Iterator[str]:
    if trial.grad_accum == 1:
        yield "no_sync=false changes nothing with grad_accum=1, after whose only pass gradients are averaged anyway"


# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    # optimizer
    Technique("optimizer", "default", "AdamW as torch chooses to run it (the Trainer's own default: fused)",
              module=_TORCH, checked=("cpu", "simulated")),
    Technique("optimizer", "adamw_torch", "AdamW as torch chooses to run it: foreach on CUDA", optim="adamw_torch",
              module=_TORCH, checked=("cpu", "simulated"), proven=H200),
    Technique("optimizer", "adamw_torch_fused", "AdamW in one kernel, no temporaries", optim="adamw_torch_fused",
              module=_TORCH, checked=("cpu", "simulated"), proven=H100,
              rules=(_fused_under_deepspeed,)),
    Technique("optimizer", "adamw_torch_foreach", "AdamW on all parameters at once, with temporaries of their size",
              module=_TORCH, checked=("cpu", "simulated"), proven=H200),
    Technique("optimizer", "adamw_torch_loop", "AdamW parameter by parameter (foreach=False), small temporaries",
              module=_TORCH, checked=("cpu", "simulated"), proven=H200),
    Technique("optimizer", "sgd", "SGD without momentum: no state", optim="sgd",
              module=_TORCH, checked=("cpu", "simulated"), proven=H200),
    Technique("optimizer", "sgd_momentum", "SGD with a momentum of 0.9: one value a parameter",
              module=_TORCH, checked=("cpu", "simulated"), proven=H200),
    Technique("optimizer", "adafactor", "transformers' Adafactor: a value a row and a column", optim="adafactor",
              module=".techniques.adafactor", checked=("cpu", "simulated"),
              proven=H200, excludes=NO_DTENSOR,
              source="https://arxiv.org/abs/1804.04235"),
    *(Technique("optimizer", name, meaning, optim=name, module=".techniques.bitsandbytes_optimizers",
                packages=BITSANDBYTES,
                checked=("simulated", "gpu") if name.startswith("paged") else ("cpu", "simulated"),
                proven=H100 if name == "adamw_bnb_8bit" else H200,
                excludes=NO_DTENSOR + NOT_PAGED if name.startswith("paged") else NO_DTENSOR,
                source="https://arxiv.org/abs/2302.06675" if name == "lion_32bit" else
                "https://huggingface.co/docs/bitsandbytes/main/en/optimizers")
      for name, meaning in (
          ("adamw_bnb_8bit", "bitsandbytes' AdamW, state in 8 bits"),
          ("paged_adamw_8bit", "the same in managed memory: not torch's, NVML sees what is on the GPU"),
          ("paged_adamw_32bit", "bitsandbytes' AdamW, state in fp32, in managed memory"),
          ("lion_32bit", "bitsandbytes' Lion: one fp32 value a parameter"),
          ("lion_8bit", "the same in 8 bits"),
          ("paged_lion_8bit", "the same in managed memory"))),
    Technique("optimizer", "adamw_torch_8bit", "torchao's AdamW, state in 8 bits, compiled", optim="adamw_torch_8bit",
              module=".techniques.torchao_adamw", packages=TORCHAO, capability=(7, 0),
              checked=("cpu", "simulated"), proven=H200, excludes=NO_DTENSOR,
              source="https://github.com/pytorch/ao/tree/main/torchao/optim"),
    Technique("optimizer", "adamw_torch_4bit", "torchao's AdamW, state in 4 bits, compiled", optim="adamw_torch_4bit",
              module=".techniques.torchao_adamw", packages=TORCHAO, capability=(7, 0),
              checked=("cpu", "simulated"), proven=H200, excludes=NO_DTENSOR,
              source="https://github.com/pytorch/ao/tree/main/torchao/optim"),
    Technique("optimizer", "deepspeed_fused_adam", "DeepSpeed's FusedAdam (ds_config's AdamW): no temporaries",
              module=".techniques.deepspeed_adam", runners=("deepspeed", "trainer"), shardings=ZERO,
              checked=("simulated", "gpu"),
              excludes=(("device", ("cpu",), "its kernel needs CUDA; on device=cpu use adamw_torch"),
                        ("offload_optimizer", (True,), "it steps on the GPU; use deepspeed_cpu_adam")),
              source="https://deepspeed.readthedocs.io/en/latest/optimizers.html"),
    Technique("optimizer", "deepspeed_cpu_adam", "DeepSpeedCPUAdam (ds_config's AdamW with offload)",
              module=".techniques.deepspeed_adam", runners=("deepspeed", "trainer"), shardings=ZERO,
              checked=("cpu", "simulated"),
              excludes=(("offload_optimizer", (False,), "it steps in host memory; add offload_optimizer=true, or use "
                         "deepspeed_fused_adam"),),
              source="https://deepspeed.readthedocs.io/en/latest/optimizers.html"),
    # no_sync
    Technique("no_sync", True, "DistributedDataParallel.no_sync"),
    Technique("no_sync", False, "gradients are averaged after every accumulated pass", runners=("torch",),
              shardings=DDP, checked=("cpu", "simulated"), rules=(_accumulating,), source="https://docs.pytorch.org/docs/"
              "stable/generated/torch.nn.parallel.DistributedDataParallel.html"),
)
# fmt: on
