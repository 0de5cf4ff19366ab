"""The process group in which the ranks of a sharded run meet.

runners/worker/worker.py starts a process for each rank and gives it torch's rendezvous variables. A simulated run has
one process, rank 0 of a group whose other members do not exist. Its collectives return at once and move nothing.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.harness.spec.trial import Trial

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def backend(trial: Trial, device: torch.device) -> str:
    """Prepare the rendezvous; return the name of the backend to join with. A simulated run joins here already."""
    world = trial.world_size
    # a single rank meets nobody, but without these variables DeepSpeed asks for MPI
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in alone.items():
        os.environ.setdefault(key, value)
    if trial.device.name != "simulated":
        return BACKENDS[device.type]
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # accelerate's own "cpu:0" is another device to fake tensors
    if dist.is_initialized():
        dist.destroy_process_group()
    with _disable_current_modes():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return "fake"


def join(trial: Trial, device: torch.device) -> None:
    """Join the process group."""
    name = backend(trial, device)
    if not dist.is_initialized():
        dist.init_process_group(name)


def mesh(trial: Trial, device: torch.device) -> DeviceMesh:
    """Join; return a mesh of all ranks in one dimension, whose table of ranks is real even if all else is fake."""
    join(trial, device)
    with _disable_current_modes():
        return init_device_mesh(device.type, (trial.world_size,))
