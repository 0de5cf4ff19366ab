"""What becomes of activations between forward and backward: recomputed, offloaded, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.shardings import WHOLE
from vramsweep.harness.spec.techniques.schema import H100, Axis, Technique

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

# fmt: off
AXES = (
    Axis("checkpointing", str, "none", "which activations are recomputed in the backward pass"),
    Axis("checkpointing_every", int, 1, "only every so many-th layer, the first of them included",
         of=("checkpointing", ("full", "selective"))),
    Axis("checkpointing_reentrant", bool, False, "torch.utils.checkpoint's older implementation (use_reentrant)",
         of=("checkpointing", ("full",))),
    Axis("checkpointing_ops", str, "default", "operators whose results are kept, names joined by +; default: matrix "
         "products and attention", of=("checkpointing", ("selective",))),
    Axis("activation_offload", bool, False, "what autograd saves for the backward pass waits in host memory"),
    Axis("compile", str, "none", "torch.compile, and in which mode"),
)
NOT_SIMULATED = ("device", ("simulated",), "a compiler fuses operators and plans memory anew; compile=none predicts "
                 "the eager figure")
# fmt: on
NO_GRAPHS = ("device", ("cpu",), "it launches CUDA graphs; on device=cpu use compile=default")
_CHECKPOINTING = ".techniques.checkpointing"


def _not_compiled(trial: Trial) -> Iterator[str]:
    if trial.compile != "none":
        yield f"activation_offload with compile={trial.compile}: the compiler decides what is saved; use compile=none"


def _recorded_first(trial: Trial) -> Iterator[str]:
    """The first step runs without the graph, the second records it (torch/_inductor/cudagraph_trees.py)."""
    if trial.protocol.warmup_steps < 2:
        yield (
            f"compile={trial.compile} records its CUDA graphs in the second step, which is no warm-up step with "
            f"protocol={trial.protocol.name}; use protocol=quick, or protocol.warmup_steps=2"
        )


def _one_pass(trial: Trial) -> Iterator[str]:
    """A gradient is an output of the graph, and each replay overwrites it (pytorch issue 169545)."""
    if trial.grad_accum > 1:
        yield (
            f"compile={trial.compile} with grad_accum={trial.grad_accum}: the next pass of the CUDA graph overwrites "
            "the gradients that were to be added to; use grad_accum=1 with a larger micro_batch, or compile=default"
        )


_GRAPHS = (_one_pass, _recorded_first)

# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    # checkpointing
    Technique("checkpointing", "none", "nothing is recomputed"),
    Technique("checkpointing", "full", "each layer keeps its input and recomputes the rest", module=_CHECKPOINTING,
              checked=("cpu", "simulated"), proven=H100,
              source="https://docs.pytorch.org/docs/stable/checkpoint.html"),
    Technique("checkpointing", "selective", "each layer also keeps what chosen operators return (checkpointing_ops)",
              module=_CHECKPOINTING, checked=("cpu", "simulated"), proven=H100, source="https://docs.pytorch.org/docs/stable/"
              "checkpoint.html#torch.utils.checkpoint.create_selective_checkpoint_contexts"),
    # activation_offload
    Technique("activation_offload", False, "it stays on the device"),
    Technique("activation_offload", True, "it is copied to pinned memory and back (save_on_cpu), but for weights",
              module=".techniques.activation_offload", checked=("simulated", "gpu"),
              shardings=WHOLE, rules=(_not_compiled,), excludes=(
                  ("device", ("cpu",), "there all memory is the host's; simulate it, or measure on device=cuda"),
                  ("checkpointing", ("selective",), "what its operators return is kept past autograd's hooks, on the "
                   "device; use checkpointing=full or none")),
              source="https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu"),
    # compile
    Technique("compile", "none", "eager"),
    *(Technique("compile", mode, meaning, module=".techniques.compile", runners=("torch", "trainer"),
                shardings=("none",), excludes=(NOT_SIMULATED, *more), rules=rules, checked=checked,
                source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html")
      for mode, meaning, more, rules, checked in (
          ("default", "torch.compile of the whole model", (), (), ("cpu", "gpu")),
          ("reduce-overhead", "and its kernels launched as CUDA graphs", (NO_GRAPHS,), _GRAPHS, ("gpu",)),
          ("max-autotune", "and matrix products tuned by trying", (NO_GRAPHS,), _GRAPHS, ("gpu",)))),
)
# fmt: on
