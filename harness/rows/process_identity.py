"""The identity of a process, kept in files so that another process can tell later whether it still runs.

Process ids are reused, so the start is kept too: in ticks, because the time of day and psutil's creation time jump.
"""

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def own_identity() -> dict[str, Any]:
    """Return the identity of this process, in values that JSON can hold."""
    return {"host": platform.node(), "pid": os.getpid(), "ticks": _ticks(os.getpid()), **_space()}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether the process that `own_identity` describes still runs; None if that cannot be told from here, as of
    another host or container."""
    pid, ticks = process.get("pid"), process.get("ticks")
    if process.get("host") != platform.node() or not isinstance(pid, int) or not isinstance(ticks, int):
        return None
    if process.get("boot") != _space()["boot"]:
        return False
    return None if process.get("space") != _space()["space"] else _ticks(pid) == ticks


def _ticks(pid: int) -> int | None:
    """Return a process's start in ticks since the boot: field 22 of proc_pid_stat(5). None if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return None if state == "Z" else int(fields[18])
    return None


def _space() -> dict[str, Any]:
    """Return where process ids are valid: the boot's id, and the inode of the container's pid namespace."""
    found: dict[str, Any] = {"boot": None, "space": None}
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["space"] = Path("/proc/self/ns/pid").stat().st_ino
    return found
