"""Runs verbs, each in a word, as on Windows, as far as Linux can play it: without POSIX's modules and functions, in a
locale of cp1252, where reading or writing a text without saying its encoding is an error. Libraries are imported first:
theirs is their own way to be elsewhere."""

import codecs
import importlib
import os
import signal
import sys
import warnings
from typing import Any

LIBRARIES = (
    "numpy", "pandas", "pyarrow.csv", "pyarrow.json", "pyarrow.parquet", "scipy.stats", "scipy.optimize",
    "plotly.io", "plotly.graph_objects", "jinja2", "rich.console", "rich.live", "rich.table",
    "pydantic", "psutil", "yaml", "asyncio", "concurrent.futures", "subprocess", "tempfile", "shutil", "platform",
    "socket", "multiprocessing",
)  # fmt: skip
MODULES = ("fcntl", "grp", "pwd", "pty", "resource", "syslog", "termios", "tty")
FUNCTIONS = (
    "chown", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getpgrp",
    "getpriority", "getuid", "initgroups", "killpg", "lchown", "mkfifo", "nice", "openpty", "posix_fallocate", "pread",
    "pwrite", "sched_getaffinity", "sched_setaffinity", "setpgid", "setsid", "sync", "uname", "waitid", "O_CLOEXEC",
    "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "EX_OK",
)  # fmt: skip
SIGNALS = ("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2")


class _Missing:
    """Finds nothing of that name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def elsewhere() -> None:
    """From here on this process is elsewhere."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Missing())  # type: ignore[arg-type]
    for of, names in ((os, FUNCTIONS), (signal, SIGNALS)):
        for name in names:
            if hasattr(of, name):
                delattr(of, name)
    rename = os.rename

    def strict_rename(source: Any, target: Any, **rest: Any) -> None:
        if os.path.exists(target):  # noqa: PTH110
            raise FileExistsError(17, "exists already, which Windows does not write over", str(target))
        rename(source, target, **rest)

    os.rename = strict_rename
    warnings.filterwarnings("error", category=EncodingWarning, module=r"vramsweep\.")
    assert codecs.lookup(sys.stdout.encoding).name == "cp1252" and sys.flags.warn_default_encoding


if __name__ == "__main__":
    elsewhere()
    from vramsweep.__main__ import main

    assert "fcntl" not in sys.modules
    for line in sys.argv[1:]:
        status = main(line.split())
        if status > line.startswith("check"):  # which may have findings
            sys.exit(f"status {status}: {line}")
