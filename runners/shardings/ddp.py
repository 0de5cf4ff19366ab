"""DistributedDataParallel: every rank holds the whole model, and gradients are averaged in buckets."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vramsweep.harness.trial import Trial
from vramsweep.runners import build, ranks


def sharded(trial: Trial, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """The wrapped model, and the size of its buckets."""
    net = build.model(trial, device)
    dist.init_process_group(ranks.backend(trial, device))
    wrapped = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    return wrapped, {"bucket_cap_mb": wrapped.bucket_bytes_cap / (1 << 20)}
