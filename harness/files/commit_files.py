"""The files of a commit of the user's git repository, in a folder of their own."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from vramsweep.harness.messages.errors import UserError


def export_commit(revision: str, folder: Path) -> str:
    """Write all files of a commit of the current folder's repository into `folder`; return the commit's short hash.

    The repository stays as it is; its submodules are left out. Raises UserError if there is no such commit.
    """
    top = _git(Path(), "rev-parse", "--show-toplevel")
    found = None if top is None else _git(Path(), "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if top is None or found is None:
        where = "the current folder is in no git repository" if top is None else f"git knows no commit {revision}"
        raise UserError(f"{where}; name a target as REV:path/to/file.py:build inside the repository")
    commit = found.decode().strip()
    files = _git(Path(top.decode().rstrip("\n")), "archive", "--format=tar", commit)
    if files is None:
        raise UserError(f"git cannot export commit {revision}; try: git archive {commit[:12]}")
    try:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(folder, filter="data")  # which keeps every file inside the folder
    except tarfile.TarError as error:
        raise UserError(f"commit {revision} has files that cannot be exported: {error}") from None
    return commit[:12]


def _git(folder: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except OSError as error:
        raise UserError(
            f"git cannot be started ({error.strerror}); install it, or name two trials by settings"
        ) from None
    return done.stdout if done.returncode == 0 else None
