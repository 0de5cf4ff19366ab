"""Who a process is, so that another one can tell later whether it still runs: for what is left in files.

A process id is given again. Not by the time of day: that jumps, and with it what psutil calls a process's creation.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def own_identity() -> dict[str, Any]:
    """This process, in values that JSON can say."""
    return {"host": platform.node(), "pid": os.getpid(), "ticks": _ticks(os.getpid()), **_space()}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether the process that `own_identity` describes still runs; None where that cannot be told from here, as of
    another host or container."""
    pid, ticks = process.get("pid"), process.get("ticks")
    if process.get("host") != platform.node() or not isinstance(pid, int) or not isinstance(ticks, int):
        return None
    if process.get("boot") != _space()["boot"]:
        return False
    return None if process.get("space") != _space()["space"] else _ticks(pid) == ticks


def _ticks(pid: int) -> int | None:
    """When a process was started, in ticks since the boot: field 22 of proc_pid_stat(5). None if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return None if state == "Z" else int(fields[18])
    return None


def _space() -> dict[str, Any]:
    """What process ids are valid in: since which boot, and in which container."""
    found: dict[str, Any] = {"boot": None, "space": None}
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["space"] = Path("/proc/self/ns/pid").stat().st_ino
    return found
