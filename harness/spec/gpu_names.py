"""A GPU's name as it is typed: which listed GPU it is, or what to type instead. Text from the table of GPUs."""

from __future__ import annotations

import re

from vramsweep.harness.hardware.gpu_lookup import GPUS, Gpu, find_gpu
from vramsweep.harness.messages import suggestions

_COUNTED = re.compile(r"(?P<n>\d+)\s*[x*,:\s]\s*(?P<name>.+)|(?P<other>.+?)\s*[x*,:]\s*(?P<m>\d+)", re.IGNORECASE)


def find_name(typed: str) -> str | None:
    """Return the listed name that is meant: in another case, or as the driver calls the GPU; None where there is none.

    Part of a name is none, because a GPU that is added to the table later could have it too.
    """
    plain, device = _plain(typed), find_gpu(typed)
    return next((gpu.name for gpu in GPUS if gpu.name == plain or gpu is device), None)


def unknown_gpu(said: str, typed: str) -> str:
    """`gpu=8xh100`: what to write, which names begin so, or which is near; `said` is the word as it was typed."""
    if (found := _COUNTED.fullmatch(typed)) and (like := _like(found["name"] or found["other"])):
        others = f" (or {', '.join(gpu.name for gpu in like[1:])})" if like[1:] else ""
        ranks = f"world_size={found['n'] or found['m']} sharding=fsdp2"
        return f"{said}: gpu= names one kind of GPU, world_size= how many; write {ranks} gpu={like[0].name}{others}"
    if len(like := _like(typed)) > 1:
        each = ", ".join(f"{gpu.name} ({gpu.memory_gib:g} GiB{f', {gpu.link}' if gpu.link else ''})" for gpu in like)
        return f"{said} may be any of {each}; name one of them"
    near = suggestions.did_you_mean(typed, [gpu.name for gpu in GPUS]) or "; "
    near = f"; did you mean {like[0].name}?" if like else near
    more = "for one that is not listed say what it has: device.memory_gib=8 device.capability=7.5"
    return f"{said}: there is no such GPU{near} `vramsweep gpus` lists all {len(GPUS)}; {more}".replace(";  ", "; ")


def _like(typed: str) -> list[Gpu]:
    """Return the GPUs whose names begin with whole words of this, or RTX and these: the plainest, smallest first."""
    name = _plain(typed).removeprefix("geforce-").replace("rtx-", "rtx")
    found = [gpu for gpu in GPUS if f"{gpu.name}-".startswith((f"{name}-", f"rtx{name}-"))]
    return sorted(found, key=lambda gpu: (gpu.name.count("-"), gpu.memory_gib))


def _plain(typed: str) -> str:
    return re.sub(r"[\s_]+", "-", typed.strip().casefold()).removeprefix("nvidia-")
