"""A Slurm cluster of one node, this one, for as long as it is wanted: its daemons in a folder of their own.

From Debian's packages (apt-get install slurm-wlm munge), as root, without cgroups and without a database, so in a
container too. By hand: `python tests/slurm/start.py` runs a shell in which sbatch, squeue and vramsweep meet it.
"""

import contextlib
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
STARTS_S = 30.0
# Nodes are given more cores than they have, so that two jobs run at once anywhere.
CONF = Path(__file__).with_name("slurm.conf").read_text()


def missing() -> str | None:
    """Why no cluster can be started here, None where one can."""
    if os.geteuid() != 0:
        return "needs root, to start Slurm's daemons"
    if gone := [name for name in NEEDED if shutil.which(name, path=_path()) is None]:
        return f"no {gone[0]} on this machine (apt-get install slurm-wlm munge)"
    return None


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands meet the cluster. Raises RuntimeError if it does not come up."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        folder, environ = Path(name), os.environ | {"PATH": _path()}
        for one in ("state", "spool"):
            (folder / one).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        folder.chmod(0o711)
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(host=platform.node().partition(".")[0], ports=_free_ports(2), folder=folder))
        environ["SLURM_CONF"] = str(conf)

        def start(*command: str) -> None:
            log = stack.enter_context((folder / f"{command[0]}.out").open("wb"))
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(_end, process)

        start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        _until(lambda: (folder / "munge.sock").exists(), folder)
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D")
        _until(lambda: "idle" in _said(environ, "sinfo", "-h", "-o", "%T"), folder)
        try:
            yield environ
        finally:
            _said(environ, "scancel", "--full", "--user=root")
            with contextlib.suppress(RuntimeError):
                _until(lambda: not _said(environ, "squeue", "-h"), folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _said(environ: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout


def _until(condition: object, folder: Path) -> None:
    assert callable(condition)
    limit = time.monotonic() + STARTS_S
    while not condition():
        if time.monotonic() > limit:
            logs = [
                f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in sorted(folder.glob("*.[lo][ou]*"))
            ]
            raise RuntimeError("\n".join(["Slurm does not come up", *logs]))
        time.sleep(0.1)


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    with cluster() as found:
        subprocess.run(sys.argv[1:] or [os.environ.get("SHELL", "/bin/sh")], env=found, check=False)
