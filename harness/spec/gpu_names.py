"""GPU names as people type them: the listed GPU that is meant, or what to type instead. Text from the table of GPUs."""

import re

from vramsweep.harness.hardware.gpu_lookup import GPUS, Gpu
from vramsweep.harness.messages import suggestions

_COUNTED = re.compile(r"(?P<n>\d+)\s*[x*,:\s]\s*(?P<name>.+)|(?P<other>.+?)\s*[x*,:]\s*(?P<m>\d+)", re.IGNORECASE)
_SXM = {f"sxm{version}" for version in ("", *range(2, 7))}  # boards with NVLink; our names say only PCIe and NVL


def find_name(typed: str) -> str | None:
    """Return the listed name that is meant by it or by the driver's whole name, in any case; None if there is none.

    Part of a name does not count, because a GPU that is added to the table later could have it too.
    """
    return next((gpu.name for gpu in GPUS if _plain(typed) in (gpu.name, *map(_plain, gpu.devices))), None)


def unknown_gpu(said: str, typed: str) -> str:
    """Return what to write for `gpu=8xh100`, which names begin so, or which is near; `said`: as typed."""
    if (found := _COUNTED.fullmatch(typed)) and (like := _like(found["name"] or found["other"])):
        others = f" (or {', '.join(gpu.name for gpu in like[1:])})" if like[1:] else ""
        ranks = f"world_size={found['n'] or found['m']} sharding=fsdp2"
        return f"{said}: gpu= is the kind of GPU, world_size= how many; write {ranks} gpu={like[0].name}{others}"
    if len(like := _like(typed)) > 1:
        each = ", ".join(f"{gpu.name} ({gpu.memory_gib:g} GiB{f', {gpu.link}' if gpu.link else ''})" for gpu in like)
        return f"{said} may be any of {each}; name one of them"
    near = f"; did you mean {like[0].name}?" if like else suggestions.did_you_mean(typed, [gpu.name for gpu in GPUS])
    more = "" if like else "; describe one that is not listed: device.memory_gib=8 device.capability=7.5"
    return f"{said}: there is no such GPU{near or ';'} `vramsweep gpus` lists all {len(GPUS)}{more}"


def _like(typed: str) -> list[Gpu]:
    """Return the GPUs that may be meant, the plainest and smallest first.

    Their names begin with the first word, or with RTX and it, and contain the other words.
    """
    first, *words = _plain(typed).replace("rtx-", "rtx").split("-")
    named = ((gpu, set(gpu.name.split("-"))) for gpu in GPUS if gpu.name.split("-")[0] in (first, f"rtx{first}"))
    found = [gpu for gpu, parts in named if {*words} <= parts | (set() if parts & {"pcie", "nvl"} else _SXM)]
    return sorted(found, key=lambda gpu: (gpu.name.count("-"), gpu.memory_gib))


def _plain(typed: str) -> str:
    return re.sub(r"^((nvidia|tesla|geforce)-)+", "", re.sub(r"[\s_]+", "-", typed.strip().casefold()))
