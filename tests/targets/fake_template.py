"""A template that speaks the protocol (harness/process/fork_server.py); `mode` is how the first one started
misbehaves."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

RESULT: dict[str, Any] = {"values": {"loss_last": 1.0}}


def say(pipe: int, event: str, **more: object) -> None:
    os.write(pipe, json.dumps({"event": event, **more}).encode() + b"\n")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def child(folder: Path) -> None:
    os.setsid()
    os.close(pipe)
    if mode == "floods":
        log = os.open(folder / "stdout.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in range(400):
            os.write(log, (f"line {number} " + "x" * 20_000 + "\n").encode())
            time.sleep(0.002)
    if mode == "survives":
        (folder.parent / "survivor").write_text(str(os.getpid()))
        time.sleep(3600)
    (folder / "result.json").write_text(json.dumps(RESULT))
    os._exit(0)


mode, runner = sys.argv[1:3]
requests, replies, parent = map(int, sys.argv[3:6])
starts = Path(os.environ["STARTS"])
with starts.open("a") as file:
    file.write(f"{os.getpid()}\n")
if len(starts.read_text().splitlines()) > 1 and mode != "dies_always":
    mode = "good"

if mode == "stopped_at_start":
    stop()
elif mode == "garbage_at_start":
    os.write(replies, b"Loading\xff extension ...\n")
elif mode == "endless":
    while True:
        os.write(replies, b"x" * 4096)
elif mode.startswith("dies"):
    sys.exit("Traceback ...\nImportError: libcudart.so.12: no such file\n")
elif mode == "killed_at_start":
    os.kill(os.getpid(), signal.SIGKILL)
say(replies, "ready", unclean="importing it makes a CUDA context" if mode == "unclean" else None)
asked = socket.socket(fileno=requests)
while True:
    request, pipes, _, _ = socket.recv_fds(asked, 1 << 16, 1)
    if not request:
        break
    (pipe,) = pipes
    if mode == "stopped_at_fork":
        stop()
    elif mode == "garbage_at_fork":
        os.write(pipe, b"[1, 2]\n")
    elif mode == "refuses":
        say(pipe, "refused", why="Resource temporarily unavailable")
        mode = "good"
        continue
    elif mode.startswith("pid "):
        say(pipe, "forked", pid=json.loads(os.environ.get("VICTIM", "null") if mode == "pid victim" else mode[4:]))
        continue
    pid = os.fork()
    if pid == 0:
        child(Path(json.loads(request)["attempt"]))
    say(pipe, "forked", pid=pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if mode == "stopped_at_reap":
        stop()
    elif mode == "garbage_at_end":
        os.write(pipe, b"oops\n")
        stop()
    elif mode == "odd_status":
        say(pipe, "ended", status="fine")
        stop()
    say(pipe, "ended", status=os.waitpid(pid, 0)[1])
    os.close(pipe)
