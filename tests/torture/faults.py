"""The table of faults: a name, a function that injects it some times, and how often in the long and short form.

`inject(arena, times)` returns the counts. It raises Missing if the machine does not allow the fault (no root, no
cgroup, no faketime); the table then says why.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torture.arena import ENDS_S, ROOT, SEVERAL, SLOTS, TARGETS, USUAL, Arena, Count, Sweep
from vramsweep.harness.rows import journal, outcome
from vramsweep.harness.rows.schema import Outcome

sys.path[:0] = [str(ROOT / "tests" / "harness" / "rows"), str(TARGETS.parent)]  # texts of CUDA's faults, the targets
CGROUPS = Path("/sys/fs/cgroup")
FAKETIME = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")
FOREIGN = (b"half a line of somebody", b"", b"\r\n", b'{"trial_id": "a"}\n')
WINDOW_S = {"launcher": 7.0, "all": 7.0, "guard": 3.0}  # most from the start, or last fault, to the next; else 1.5


class Missing(Exception):
    """The fault cannot be injected on this machine; the text says why."""


@dataclass(frozen=True)
class Fault:
    """A fault. `long` and `short` are how often it is injected in the two forms; 0: not in that form."""

    name: str
    inject: Callable[[Arena, int], Count]
    long: int
    short: int


def each(does: Callable[[Arena, Sweep], None], *words: str, trials: int = 12) -> Callable[[Arena, int], Count]:
    """Return an `inject` that calls `does` on new sweeps until enough faults were injected; it finishes each sweep."""

    def inject(arena: Arena, times: int) -> Count:
        count = Count()
        while count.injected < times:
            sweep = arena.sweep(count, *words, trials=trials)
            does(arena, sweep)
            sweep.finish()
        return count

    return inject


def killing(role: str, number: int, *words: str, base: Sequence[str] = USUAL) -> Callable[[Arena, int], Count]:
    """Return an `inject` that sends a signal to a random process of a role, or to all if "all", at a random moment."""

    def inject(arena: Arena, times: int) -> Count:
        count, sweep = Count(), None
        while count.injected < times:
            if sweep is None or sweep.done():
                if sweep is not None:
                    sweep.finish()
                sweep = arena.sweep(count, *words, base=base)
                sweep.start()
            elif sweep.ended():
                if sweep.wait() == 2:  # refused: this would repeat for ever
                    count.say(sweep.said()[-300:])
                    break
                sweep.start()
            pids = _at_a_random_moment(arena, sweep, role)
            if not pids or (sweep.done() and role != "report"):  # the report is written when all is done
                continue
            for pid in pids if role == "all" else [arena.random.choice(pids)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            sweep.inject()
            if role in ("launcher", "all"):
                _ended_as_told(sweep, {0, 130} if number == signal.SIGTERM else {0, -number}, number)
        if sweep is not None:
            sweep.finish()
        return count

    return inject


def _ended_as_told(sweep: Sweep, codes: set[int], number: int) -> None:
    """Wait for the launcher; its exit status must be one of `codes`, or the signal's if Python was still starting."""
    code = sweep.wait(60)
    if code not in codes and not (code == -number and sweep.early()):
        sweep.count.lose(f"exit status {code} after signal {number}: {sweep.said()[-300:]}")


def _at_a_random_moment(arena: Arena, sweep: Sweep, role: str) -> list[int]:
    """Wait for a random moment; return the processes of the role then, or as soon as there is one."""
    until = time.monotonic() + arena.random.uniform(0, WINDOW_S.get(role, 1.5))
    while time.monotonic() < until and not sweep.ended():
        time.sleep(0.01)
    while not sweep.ended():
        if pids := sweep.role(role):
            return pids
        time.sleep(0.02)
    return []


def stopped(role: str) -> Callable[[Arena, int], Count]:
    """Return an `inject` that sends SIGSTOP, and SIGCONT 0.5 to 3 s later; a worker is never continued."""

    def stop(arena: Arena, sweep: Sweep) -> None:
        sweep.start()
        if pids := _at_a_random_moment(arena, sweep, role):
            os.kill(pids[0], signal.SIGSTOP)
            sweep.inject()
            if role != "worker":
                time.sleep(arena.random.uniform(0.5, 3))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[0], signal.SIGCONT)

    return each(stop, "timeout_s=6", trials=4)


def interrupted(presses: int, number: int = signal.SIGINT, status: int = 130) -> Callable[[Arena, int], Count]:
    """Return an `inject` that sends Ctrl-C (or SIGHUP) as a terminal does, to the launcher's whole process group."""

    def interrupt(arena: Arena, sweep: Sweep) -> None:
        sweep.start()
        if not _at_a_random_moment(arena, sweep, "launcher"):
            return
        for _ in range(presses):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(sweep.role("launcher")[0] if sweep.role("launcher") else 1 << 22, number)
            time.sleep(arena.random.uniform(0, 0.3))
        sweep.inject()
        _ended_as_told(sweep, {0, status}, number)
        if presses == 1 and sweep.rows() and not _reported(sweep):
            sweep.count.lose(f"there are rows and no report: {sweep.said()[-300:]}")

    return each(interrupt, "report=true", trials=6)


def _reported(sweep: Sweep) -> bool:
    """Return whether there is a report; if only its drawing was interrupted, run the same command again first."""
    page = sweep.place / "report.html"
    stopped_trials = not sweep.done() or "interrupted; finished rows are kept" in sweep.said()
    if not page.exists() and not stopped_trials:
        sweep.start()
        sweep.wait()
    return page.exists()


MISBEHAVIOUR = {
    "hangs_in_c": "timeout", "hangs_in_python": "timeout", "hangs_in_import": "timeout", "hangs_at_the_end": "ok",
    "ignores_signals": "timeout", "floods": "ok", "forks_daemons": "ok", "exits_without_a_result": "bad_result",
    "writes_garbage": "bad_result", "writes_nan": "bad_result", "writes_too_much": "bad_result",
    "writes_the_row_of_another": "bad_result", "closes_its_pipes": "ok", "closes_every_file": "crash",
    "starts_threads_that_stay": "ok", "forks_for_ever": "ok",
}  # fmt: skip


def misbehaving(*names: str) -> Callable[[Arena, int], Count]:
    """Return an `inject` of sweeps with a worker for each name, and a good one; check each row's outcome."""

    def inject(arena: Arena, times: int) -> Count:
        count = Count()
        for _ in range(times):
            targets = ",".join(f"{TARGETS}:{name}" for name in (*names, "good"))
            sweep = arena.sweep(count, f"runner.target={targets}", "timeout_s=8", "retries=0", trials=len(names) + 1)
            _answered(sweep, {name: MISBEHAVIOUR[name] for name in names} | {"good": "ok"})
            logs = [path.stat().st_size for path in sweep.place.glob("trials/attempts/**/*.log")]
            if max(logs, default=0) > 80 << 20:
                count.lose(f"a log of {max(logs)} bytes stayed")
        return count

    return inject


def _answered(sweep: Sweep, expected: dict[str, str], prefix: Sequence[str] = ()) -> None:
    """Run a sweep with a trial for each expected target; each must have the expected outcome."""
    sweep.words = [word for word in sweep.words if not word.startswith("seed=")]
    sweep.start(prefix)
    sweep.inject()
    sweep.wait()
    rows = {str(row["trial"]["runner"]["target"]).rpartition(":")[2]: row for row in sweep.rows() if row["terminal"]}
    for name, kind in expected.items():
        found = rows.get(name, {})
        if found.get("outcome") != kind:
            sweep.count.lose(f"{name}: {found.get('outcome', 'no row')} ({found.get('reason')})")
    sweep.count.resumed += rows.keys() >= expected.keys()


def memory_filled(arena: Arena, times: int) -> Count:
    """Let a worker fill a cgroup of 3 GiB; the launcher must end it before the kernel kills a process."""
    count = Count()
    with _cgroup("memory", {"memory.max": str(3 << 30), "memory.limit_in_bytes": str(3 << 30)}) as (enter, _):
        for _ in range(times):
            targets = f"runner.target={TARGETS}:fills_memory,{TARGETS}:good"
            sweep = arena.sweep(count, targets, "timeout_s=60", "retries=0", trials=2)
            _answered(sweep, {"fills_memory": "host_oom", "good": "ok"}, enter)
            said = [str(row["reason"]) for row in sweep.rows() if row["outcome"] == "host_oom"]
            if not any("ended because it used" in reason for reason in said):  # the kernel was faster
                count.lose(f"not by the launcher: {said}")
    return count


@contextlib.contextmanager
def _cgroup(controller: str, limits: dict[str, str]) -> Iterator[tuple[list[str], Path]]:
    """Make a cgroup with a limit, named as in version 2 or 1; yield the start of a command in it, and its folder."""
    second = (CGROUPS / "cgroup.controllers").exists()
    own = (CGROUPS if second else CGROUPS / controller) / f"vramsweep-torture-{os.getpid()}"
    try:
        own.mkdir()
        name = next(name for name in limits if (own / name).exists())
        (own / name).write_text(limits[name])
    except (OSError, StopIteration) as error:
        raise Missing(f"no cgroup can be made: {error or 'it has no such controller'}") from None
    try:
        yield ["bash", "-c", f'echo $$ > {own}/cgroup.procs && exec "$@"', "_"], own
    finally:
        with contextlib.suppress(OSError):
            own.rmdir()


def processes_exhausted(arena: Arena, times: int) -> Count:
    """Limit the number of processes and threads, for 2 s from a random moment, to those that exist and 0 to 2 more."""
    count = Count()
    with _cgroup("pids", {"pids.max": "max"}) as (enter, own):
        limit = own / "pids.max"
        while count.injected < times:
            limit.write_text("max")
            sweep = arena.sweep(count, trials=6)
            sweep.spent = True
            sweep.start(enter)
            if _at_a_random_moment(arena, sweep, "launcher"):
                now = int(limit.with_name("pids.current").read_text())
                limit.write_text(str(now + arena.random.randrange(3)))
                sweep.inject()
                time.sleep(2)
                limit.write_text("max")
            sweep.finish()
    return count


def descriptors_exhausted(arena: Arena, sweep: Sweep) -> None:
    """Start a launcher that may open only 8 to 39 files."""
    sweep.spent = True
    sweep.start(["bash", "-c", f'ulimit -n {arena.random.randrange(8, 40)}; exec "$@"', "_"])
    sweep.inject()
    sweep.wait()
    sweep.spent = False


@contextlib.contextmanager
def _small_disk(arena: Arena) -> Iterator[Path]:
    """Mount a file system of 8 MiB, and yield its folder. Raises Missing if it cannot be mounted."""
    place = arena.folder / "disk"
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(f"no file system can be mounted: {done.stderr.strip()[:80]}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _on_a_disk(break_it: Callable[[Path], None], mend: Callable[[Path], None]) -> Callable[[Arena, int], Count]:
    """Return an `inject` in which the results' disk fails at a random moment, until the launcher has ended."""

    def inject(arena: Arena, times: int) -> Count:
        count = Count()
        while count.injected < times:
            with _small_disk(arena) as place:
                sweep = arena.sweep(count, trials=8)
                sweep.words = [w for w in sweep.words if not w.startswith("results=")] + [f"results={place}"]
                sweep.place = place / "t"
                sweep.start()
                if _at_a_random_moment(arena, sweep, "launcher"):
                    break_it(place)
                    sweep.inject()
                    sweep.wait()
                    mend(place)
                sweep.finish()
        return count

    return inject


def _fill(place: Path) -> None:
    with contextlib.suppress(OSError), (place / "filler").open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()


def _remount(how: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        for _ in range(50):  # refused as long as a file is open for writing
            done = subprocess.run(
                ["mount", "-o", f"remount,{how},force" if how == "ro" else f"remount,{how}", str(place)],
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                return
            time.sleep(0.05)

    return change


def folder_gone(arena: Arena, sweep: Sweep) -> None:
    """Move the results' folder away at a random moment, and back when the launcher has ended."""
    sweep.start()
    if _at_a_random_moment(arena, sweep, "launcher") and sweep.place.exists():
        aside = sweep.place.with_name("aside")
        sweep.place.rename(aside)
        sweep.inject()
        sweep.launcher and sweep.launcher.wait()
        shutil.rmtree(sweep.place, ignore_errors=True)
        aside.rename(sweep.place)
        sweep.wait()


def clock_jumps(arena: Arena, sweep: Sweep) -> None:
    """Let the time of day jump to and fro by up to a day for launcher and workers. Raises Missing without faketime."""
    library = next((path for path in FAKETIME if Path(path).exists()), None)
    if library is None:
        raise Missing("faketime is not installed")
    offset = arena.folder / "faketimerc"
    offset.write_text("+0")
    sweep.start(environ={
        "LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    })  # fmt: skip
    while not sweep.ended():
        offset.write_text(f"{arena.random.randrange(-86400, 86400):+d}")
        time.sleep(0.2)
    sweep.inject()
    if not sweep.done():
        sweep.count.lose(sweep.said()[-300:])


def card_lost(arena: Arena, sweep: Sweep) -> None:
    """Lose one of four stand-in GPUs at a random moment; at most two attempts may meet it; all trials must succeed."""
    lost, card = sweep.place.parent / "lost", f"GPU-{arena.random.randrange(4)}"
    stand_ins = str(Path(__file__).parent / "four_cards")
    path = os.pathsep.join(filter(None, [stand_ins, os.environ.get("PYTHONPATH")]))
    sweep.start(environ={"PYTHONPATH": path, "LOST": str(lost), "LOST_CARD": card})
    _at_a_random_moment(arena, sweep, "fork server")
    lost.touch()
    sweep.inject()
    code = sweep.wait()
    attempts = sum(row["gpu_uuid"] == card and row["outcome"] == "environment" for row in sweep.rows())
    if code or attempts > 2 or not sweep.done():
        sweep.count.lose(f"exit status {code}, {attempts} attempts on the lost GPU: {sweep.said()[-300:]}")


def two_launchers(without_locks: bool = False) -> Callable[[Arena, int], Count]:
    """Return an `inject` that starts two launchers on one sweep; one is refused, or finds everything done."""
    environ = {"PYTHONPATH": str(Path(__file__).parent / "without_locks")} if without_locks else {}

    def start_both(arena: Arena, sweep: Sweep) -> None:
        other = Sweep(sweep.place.parent, (), Count(), sweep.trials)
        other.words, other.mark = sweep.words, sweep.mark
        other._out, other._err = (sweep.place.parent / f"other-{name}.txt" for name in ("out", "err"))
        sweep.start(environ=environ)
        time.sleep(arena.random.uniform(0, 3))
        other.start(environ=environ)
        sweep.inject()
        assert sweep.launcher is not None and other.launcher is not None
        if arena.random.random() < 0.5:  # kill the first
            time.sleep(arena.random.uniform(0, 3))
            sweep.launcher.kill()
        sweep.launcher.wait()
        if other.launcher.wait() not in (0, 2):
            sweep.count.lose(other.said()[-300:])
        sweep.wait()

    return each(start_both, trials=6)


def appended_to(arena: Arena, sweep: Sweep) -> None:
    """Write foreign text to the journal at a random moment; all rows of the sweep itself must stay readable."""
    sweep.start()
    at = arena.random.randrange(1, 5)
    while len(sweep.rows()) < at and not sweep.ended():
        time.sleep(0.01)
    with journal.files(sweep.place)[0].open("ab") as file:
        file.write(arena.random.choice(FOREIGN))
    sweep.inject()


def faults_of_cuda(arena: Arena, times: int) -> Count:
    """Let workers fail with each text that CUDA, its libraries and the system report: raised as torch's own classes of
    error, and printed by C++ that ends the process."""
    from misbehave import WAYS  # type: ignore[import-not-found]
    from test_error_patterns import TEXTS  # type: ignore[import-not-found]

    count = Count()
    every = len(TEXTS) * len(WAYS)
    chosen = sorted(arena.random.sample(range(every), min(times, every)))
    again = {kind.outcome: kind.now for kind in outcome.OUTCOMES}
    seeds = f"seed={','.join(map(str, chosen))}"
    sweep = arena.sweep(count, f"runner.target={TARGETS}:raises", seeds, "retries=1", trials=len(chosen))
    sweep.start()
    sweep.wait(ENDS_S + len(chosen))
    rows = sweep.rows()
    for seed in chosen:
        count.injected += 1
        (expected, text), way = TEXTS[seed // len(WAYS)], WAYS[seed % len(WAYS)]
        way = "RuntimeError" if "\n" in text and way == "abort" else way
        if way == "OutOfMemoryError":
            expected = "oom"
        elif way == "AcceleratorError" and expected == "crash":
            expected = "cuda_error"
        own = [row for row in rows if row["trial"]["seed"] == seed]
        kinds = {str(row["outcome"]) for row in own}
        tried_again = len(own) > 1
        # an exception that is not CUDA's would only be raised again; a process that ended might not end again
        wants = again[Outcome(expected)] and (expected != "crash" or way == "abort")
        if kinds != {expected} or tried_again != wants:
            count.lose(f"{way}: {text[:60]}: {kinds or 'no row'}, {len(own)} attempts")
        else:
            count.resumed += 1
    return count


FAULTS: tuple[Fault, ...] = (
    Fault("SIGKILL of the launcher", killing("launcher", signal.SIGKILL), 60, 1),
    Fault("SIGKILL of a fork server", killing("fork server", signal.SIGKILL), 100, 1),
    Fault("SIGKILL of a worker", killing("worker", signal.SIGKILL), 120, 1),
    Fault("SIGKILL of a worker, cold", killing("worker", signal.SIGKILL, "isolation=cold"), 20, 1),
    Fault("SIGKILL of the guard", killing("guard", signal.SIGKILL), 60, 1),
    Fault("SIGKILL of all at once", killing("all", signal.SIGKILL), 50, 1),
    Fault("SIGKILL of the process above a worker", killing("init", signal.SIGKILL), 30, 1),
    *(Fault(f"SIGKILL of a {role}, three slots", killing(role, signal.SIGKILL, base=SLOTS), 40, n)
      for role, n in (("launcher", 0), ("fork server", 1), ("worker", 0))),
    Fault("SIGKILL of all at once, three slots", killing("all", signal.SIGKILL, base=SLOTS), 20, 1),
    Fault("SIGTERM of the launcher, three slots", killing("launcher", signal.SIGTERM, base=SLOTS), 20, 1),
    Fault("SIGKILL of the launcher, predictions", killing("launcher", signal.SIGKILL, base=SEVERAL), 25, 0),
    Fault("SIGKILL of a worker, predictions", killing("worker", signal.SIGKILL, base=SEVERAL), 30, 0),
    Fault("SIGKILL of all at once, predictions", killing("all", signal.SIGKILL, base=SEVERAL), 25, 1),
    Fault(
        "SIGKILL of a rank of two",
        killing("rank", signal.SIGKILL, "runner=torch", "world_size=2", "sharding=ddp", "seq_len=8"),
        30, 1,
    ),
    Fault("SIGKILL of the report", killing("report", signal.SIGKILL, "report=true"), 15, 1),
    Fault("SIGTERM of the launcher", killing("launcher", signal.SIGTERM), 20, 1),
    *(Fault(f"SIGSTOP of a {role}", stopped(role), 5, 1) for role in ("launcher", "fork server", "worker")),
    Fault("Ctrl-C once", interrupted(1), 10, 1),
    Fault("Ctrl-C twice", interrupted(2), 10, 1),
    Fault("SIGHUP, as if the terminal closed", interrupted(1, signal.SIGHUP, 129), 10, 1),
    *(Fault(f"a worker that {name.replace('_', ' ')}", misbehaving(name), 2, 0) for name in MISBEHAVIOUR),
    Fault("all these workers in one sweep", misbehaving(*MISBEHAVIOUR), 1, 1),
    Fault("a worker that fills the memory", memory_filled, 5, 1),
    Fault("no more processes", processes_exhausted, 10, 1),
    Fault("few file descriptors", each(descriptors_exhausted, trials=4), 10, 1),
    Fault("the disk is full", _on_a_disk(_fill, lambda place: (place / "filler").unlink(missing_ok=True)), 10, 1),
    Fault("the disk is read-only", _on_a_disk(_remount("ro"), _remount("rw")), 6, 1),
    Fault("the folder is moved away", each(folder_gone, trials=6), 8, 1),
    Fault("the time of day jumps", each(clock_jumps, f"runner.target={TARGETS}:does_not_sleep", trials=6), 3, 1),
    Fault(
        "one GPU of four is lost",
        each(card_lost, "device=cuda", "retries=2", "backoff_s=0.1", "breaker=10", trials=40), 10, 1,
    ),
    Fault("two launchers", two_launchers(), 10, 1),
    Fault("two launchers, no locks", two_launchers(without_locks=True), 10, 1),
    Fault("another program appends to the journal", each(appended_to, trials=6), 10, 1),
    Fault("a fault of CUDA or the system", faults_of_cuda, 1 << 30, 16),
)  # fmt: skip
