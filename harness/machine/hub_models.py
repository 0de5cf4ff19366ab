"""Whether a model's config.json can be had from here: a folder, the hub's cache, or the hub, which is asked."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path

from vramsweep.harness.messages import suggestions


def find_problem(path: str) -> str | None:
    """Return why a folder or a hub id has no config.json for us; None where it has, or where nothing can be said.

    The hub is waited for as long as its library does: 10 s, or what HF_HUB_ETAG_TIMEOUT says.
    """
    folder = Path(path)
    if folder.is_dir():
        return None if (folder / "config.json").exists() else "the folder has no config.json"
    if folder.is_file():
        return "it is a file, and no folder"
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path, re.ASCII) is None:
        return f"there is no such folder{suggestions.did_you_mean_path(folder)}"
    if importlib.util.find_spec("huggingface_hub") is None:  # a light install
        return None
    hub = importlib.import_module("huggingface_hub")
    if find_config(path) is not None:
        return None
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(path, "config.json", endpoint=os.environ.get("HF_ENDPOINT")))
    except Exception as error:  # the library's, or of what it asks with
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            return f"the hub shows us no such model (status {status}; one that is gated or private needs HF_TOKEN)"
        return f"the hub cannot be reached ({str(error).strip().splitlines()[0].partition('. ')[0]:.120})"
    return None


def find_config(path: str) -> Path | None:
    """Return the config.json of a folder, or of a hub id that the cache has."""
    file = Path(path) / "config.json"
    try:
        if file.is_file() or importlib.util.find_spec("huggingface_hub") is None:
            return file if file.is_file() else None
        cached = importlib.import_module("huggingface_hub").try_to_load_from_cache(path, "config.json")
    except (OSError, ValueError):  # a folder that may not be read; no hub id
        return None
    return Path(cached) if isinstance(cached, str) else None
