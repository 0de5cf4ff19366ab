"""Targets of the custom runner that misbehave, each in one way; and one that behaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torture"))
from misbehave import forks_for_ever, good  # type: ignore[import-not-found]  # noqa: F401


def _with_step(change: Any) -> Any:
    net, optimizer, step, batches = good(None)
    count = iter(range(1000))

    def changed(batch: Any) -> torch.Tensor:
        change(next(count))
        return step(batch)

    return net, optimizer, changed, batches


def sleepy(trial: Any) -> Any:
    """Each step takes 30 ms; writes its own clock at each step's end to the file in $SLEEPY_LOG."""
    log = Path(os.environ["SLEEPY_LOG"]).open("w")  # noqa: SIM115
    net, optimizer, step, batches = good(trial)

    def slow(batch: Any) -> torch.Tensor:
        time.sleep(0.03)
        loss = step(batch)
        log.write(json.dumps(time.perf_counter()) + "\n")
        log.flush()
        return loss

    return net, optimizer, slow, batches


def killed(trial: Any) -> Any:
    return _with_step(lambda i: os.kill(os.getpid(), signal.SIGKILL) if i == 1 else None)


def hangs(trial: Any) -> Any:
    return _with_step(lambda i: time.sleep(3600) if i == 1 else None)


def raises(trial: Any) -> Any:
    raise ValueError("this target is broken")


def oom(trial: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _at_the_step_after_the_measured(trial: Any, change: Any) -> Any:
    after = trial.protocol.warmup_steps + 1 + trial.protocol.measured_steps
    return _with_step(lambda i: change() if i == after else None)


def oom_afterwards(trial: Any) -> Any:
    """Out of memory in the step whose FLOPs are counted."""

    def change() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return _at_the_step_after_the_measured(trial, change)


def killed_afterwards(trial: Any) -> Any:
    return _at_the_step_after_the_measured(trial, lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits(trial: Any) -> Any:
    os._exit(0)


def host_oom(trial: Any) -> Any:
    torch.empty(1 << 50, dtype=torch.uint8)


def fills_memory(trial: Any) -> Any:
    """Without end, 64 MiB at a time, every page touched."""
    held = []
    while True:
        held.append(torch.ones(16 << 20))


def orphan(trial: Any) -> Any:
    """Leaves a process in a session of its own behind, its id in the file $ORPHAN."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path(os.environ["ORPHAN"]).write_text(str(child.pid))
    return good(trial)


def orphan_and_hangs(trial: Any) -> Any:
    """Leave an orphan behind as `orphan` does, and hang."""
    orphan(trial)
    time.sleep(3600)


def neighbour(trial: Any) -> Any:
    """Leaves a daemon, its process id in $NEIGHBOURS. The first of two hangs; the second waits until the first one's
    daemon has gone, and fails where its own has gone too."""
    folder, pids = Path(os.environ["NEIGHBOURS"]), list[int]()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (folder / f"new-{trial.seed}").write_text(str(os.getpid()))
            (folder / f"new-{trial.seed}").rename(folder / str(trial.seed))
            time.sleep(600)
        os._exit(0)
    while len(pids) < 2:
        pids = [int((folder / name).read_text()) for name in ("1", "2") if (folder / name).exists()]
        time.sleep(0.01)
    first, own = pids
    if trial.seed == 1:
        time.sleep(600)
    while Path(f"/proc/{first}").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(own, 0)
    return good(trial)


def slow_start(trial: Any) -> Any:
    """Writes its process id to $PIDFILE and then takes its time."""
    Path(os.environ["PIDFILE"]).write_text(str(os.getpid()))
    time.sleep(3600)


def waits(trial: Any) -> Any:
    """Writes its process id to $PIDFILE and begins when the file $GO_ON is there."""
    Path(os.environ["PIDFILE"]).write_text(str(os.getpid()))
    while not Path(os.environ["GO_ON"]).exists():
        time.sleep(0.02)
    return good(trial)


def says_half_a_character(trial: Any) -> Any:
    raise RuntimeError("no file \ud800 here")


def gives_up(trial: Any) -> Any:
    sys.exit("config wrong")


def no_model(trial: Any) -> Any:
    return None, None, lambda batch: None


def aborts(trial: Any) -> Any:
    print("terminate called after throwing an instance", file=sys.stderr, flush=True)
    os.abort()
