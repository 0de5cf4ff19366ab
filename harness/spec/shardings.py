"""How ranks divide the work: an entry for each way, with all that the harness must know of it.

A new way of sharding is an entry in `SHARDINGS`, and in the runners that support it (runner_table.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """How ranks divide a model's weights, gradients and optimizer state.

    `module` is what does it (runners/shardings/interface.py says which functions it has), `stage` is ZeRO's, `preload`
    what a template imports for it, `options` arguments of what wraps the model, which runner=torch passes on.
    `measurement` is raised when what is measured under it changes: old rows no longer count then.
    """

    name: str
    meaning: str
    module: str | None = None
    stage: int | None = None
    preload: tuple[str, ...] = ()
    measurement: int = 1
    options: tuple[str, ...] = ()


_PLACE = ".shardings"
# the last two are pulled in by DeepSpeed's first initialise
_ZERO_PRELOAD = (f"{_PLACE}.zero_config", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject")
# fmt: off
SHARDINGS = (
    Sharding("none", "one rank that holds everything"),
    Sharding("ddp", "every rank holds everything; gradients are averaged in buckets (DistributedDataParallel)",
             f"{_PLACE}.ddp", options=("bucket_cap_mb", "gradient_as_bucket_view", "static_graph",
                                       "find_unused_parameters")),
    Sharding("fsdp1", "every rank holds a part of flattened blocks, gathered as needed (FullyShardedDataParallel)",
             f"{_PLACE}.fsdp", preload=(f"{_PLACE}.fsdp",),
             options=("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
                      "use_orig_params")),
    Sharding("fsdp2", "every rank holds a part of each tensor, gathered block by block (fully_shard)",
             f"{_PLACE}.fsdp", preload=(f"{_PLACE}.fsdp",), measurement=2,
             options=("reshard_after_forward",)),
    Sharding("zero0", "DeepSpeed without sharding: gradients are averaged", f"{_PLACE}.zero_config", stage=0,
             preload=_ZERO_PRELOAD, measurement=2),
    Sharding("zero1", "optimizer state divided (ZeRO 1)", f"{_PLACE}.zero_config", stage=1, preload=_ZERO_PRELOAD,
             measurement=2),
    Sharding("zero2", "and gradients (ZeRO 2)", f"{_PLACE}.zero_config", stage=2, preload=_ZERO_PRELOAD,
             measurement=2),
    Sharding("zero3", "and weights (ZeRO 3)", f"{_PLACE}.zero_config", stage=3, preload=_ZERO_PRELOAD,
             measurement=3),
)
# fmt: on
ZERO = tuple(s.name for s in SHARDINGS if s.stage is not None)
FSDP = ("fsdp1", "fsdp2")
