"""Look-up of a model's config.json: in a folder, in the hub's cache, or by a request to the hub."""

import importlib
import importlib.util
import os
import re
from pathlib import Path

from vramsweep.harness.messages import suggestions


def find_problem(path: str) -> str | None:
    """Return why we get no config.json for a folder or a hub id; None if we get one, or if it cannot be known.

    The request to the hub times out as its library does: after 10 s, or after HF_HUB_ETAG_TIMEOUT.
    """
    folder = Path(path)
    if folder.is_dir():
        return None if (folder / "config.json").exists() else "the folder has no config.json"
    if folder.is_file():
        return "it is a file, not a folder"
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path, re.ASCII) is None:
        return f"there is no such folder{suggestions.did_you_mean_path(folder)}"
    if importlib.util.find_spec("huggingface_hub") is None:  # a light install
        return None
    hub = importlib.import_module("huggingface_hub")
    if find_config(path) is not None:
        return None
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(path, "config.json", endpoint=os.environ.get("HF_ENDPOINT")))
    except Exception as error:  # of the library, or of its HTTP client
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            return f"the hub has no such model, or it is gated or private and needs HF_TOKEN (status {status})"
        return f"the hub cannot be reached ({str(error).strip().splitlines()[0].partition('. ')[0]:.120})"
    return None


def find_config(path: str) -> Path | None:
    """Return the config.json of a folder, or of a hub id in the cache; None if there is none."""
    file = Path(path) / "config.json"
    try:
        if file.is_file() or importlib.util.find_spec("huggingface_hub") is None:
            return file if file.is_file() else None
        cached = importlib.import_module("huggingface_hub").try_to_load_from_cache(path, "config.json")
    except (OSError, ValueError):  # a folder that may not be read, or not a hub id
        return None
    return Path(cached) if isinstance(cached, str) else None
