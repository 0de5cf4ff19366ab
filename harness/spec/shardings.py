"""The table of shardings, by which ranks divide the work: an entry each, with all that the harness must know of it.

A new sharding is an entry in `SHARDINGS` and a module; the tuples below the table follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """A sharding: a way in which ranks divide a model's weights, gradients and optimizer state.

    `module` does it (runners/shardings/interface.py says which functions it has). `library` wraps the model, and its
    rules hold: ddp, fsdp or deepspeed. `stage` is ZeRO's. `preload` is what a fork server imports for it. `options` are
    arguments of the wrapper, which runner=torch passes on. `arguments` are TrainingArguments that reach it alone
    (transformers 5.23, Trainer._build_accelerator_args). `runners` support it, next to those whose own entries name it
    (runner_table.py). `measurement` is raised when what is measured under it changes, because old rows no longer count.

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


_PLACE = ".shardings"
# DeepSpeed's first initialise imports the last two
_ZERO_PRELOAD = (f"{_PLACE}.zero_config", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject")
# fmt: off
SHARDINGS = (
    Sharding("none", "one rank that holds everything", simulated=True, whole=True, readable=True),
    Sharding("ddp", "every rank holds everything; gradients are averaged in buckets (DistributedDataParallel)",
             f"{_PLACE}.ddp", "ddp", simulated=True, whole=True, readable=True,
             options=("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters"),
             arguments=("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
                        "ddp_static_graph")),
    Sharding("fsdp1", "every rank holds a part of flattened blocks, gathered as needed (FullyShardedDataParallel)",
             f"{_PLACE}.fsdp", "fsdp", preload=(f"{_PLACE}.fsdp",), simulated=True, offloads=("offload_param",),
             options=("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
                      "use_orig_params"), arguments=("fsdp_config",)),
    Sharding("fsdp2", "every rank holds a part of each tensor, gathered block by block (fully_shard)",
             f"{_PLACE}.fsdp", "fsdp", preload=(f"{_PLACE}.fsdp",), measurement=2, simulated=True, readable=True,
             options=("reshard_after_forward",), offloads=("offload_param",), arguments=("fsdp_config",)),
    *(Sharding(f"zero{stage}", meaning, f"{_PLACE}.zero_config", "deepspeed", stage, _ZERO_PRELOAD, measurement,
               simulated=True, whole=stage < 3, readable=stage < 3, offloads=offloads)
      for stage, (meaning, measurement, offloads) in enumerate((
          ("DeepSpeed without sharding: gradients are averaged", 2, ()),
          ("optimizer state is divided (ZeRO 1)", 2, ("offload_optimizer",)),
          ("optimizer state and gradients are divided (ZeRO 2)", 2, ("offload_optimizer",)),
          ("optimizer state, gradients and weights are divided (ZeRO 3)", 3, ("offload_optimizer", "offload_param"))))),
)
# fmt: on
NAMES = tuple(s.name for s in SHARDINGS)
DDP, FSDP, ZERO = (tuple(s.name for s in SHARDINGS if s.library == name) for name in ("ddp", "fsdp", "deepspeed"))
WHOLE = tuple(s.name for s in SHARDINGS if s.whole)
READABLE = tuple(s.name for s in SHARDINGS if s.readable)
OF_TORCH = tuple(name for name in NAMES if name not in ("none", *ZERO))  # of several ranks, without DeepSpeed
PLAIN = tuple(name for name in WHOLE if name not in ZERO)  # whole weights, of torch's own dtypes and optimizer
