"""The files of a commit of the user's git repository, in a folder of their own."""

import io
import subprocess
import tarfile
from pathlib import Path

from vramsweep.harness.messages.errors import UserError


def export_commit(revision: str, folder: Path) -> None:
    """Write all files of a commit of the current folder's repository into `folder`; submodules are left out.

    The repository stays as it is. Raises UserError if there is no such commit.
    """
    top = _run_git("rev-parse", "--show-toplevel").decode().rstrip("\n")
    commit = _run_git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(_run_git("-C", top, "archive", "--format=tar", commit))) as archive:
        try:
            archive.extractall(folder, filter="data")  # which keeps every file inside the folder
        except tarfile.TarError as error:
            raise UserError(f"{revision} has a file that cannot be exported: {error}") from None


def _run_git(*words: str) -> bytes:
    try:
        return subprocess.run(["git", *words], capture_output=True, check=True).stdout
    except OSError as error:
        raise UserError(f"git cannot be started ({error.strerror}); install it, or name two trials") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else "it failed"
        raise UserError(f"git says {reason!r}; inside a repository, name an existing commit") from None
