"""lock.txt, a requirements file: the exact versions that rows were measured with and tables were made with.

In: rows. Out: the file's text, without package sources. A version does not identify a source build (flash-attn).
"""

from __future__ import annotations

import platform
import re
from importlib import metadata

import pandas as pd

from vramsweep.analysis.report import latex
from vramsweep.analysis.report.findings import values
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.version import __version__

OF_ROWS = {"torch": "torch_version", "transformers": "transformers_version", "deepspeed": "deepspeed_version"}
SAID = ("python_version", *OF_ROWS.values(), "cuda_version", "driver_version", "vramsweep_version", "git_commit")
ANALYSIS = (
    *("numpy", "pandas", "pyarrow", "scipy", "plotly", "mini-racer", "vl-convert-python"),
    *("jinja2", "rich", "packaging"),
)
_NAME, _VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"), re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")


def installed() -> dict[str, str]:
    """Return the version of each package in this environment, by the name that the index writes."""
    found = {}
    for one in metadata.distributions():
        name, version = str(one.metadata["Name"] or ""), str(one.version or "")
        if _NAME.fullmatch(name) and _VERSION.fullmatch(version):
            found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return dict(sorted(found.items()))


def text(frame: pd.DataFrame) -> str:
    """Return the file: all of this environment if the rows name it, else the rows' versions and the analysis's.

    Versions of rows come from outside. One that is no version becomes a comment, never a line that pip would read.
    """
    here = installed()
    of_rows = {name: sorted(set(frame[column].dropna().astype(str))) for name, column in OF_ROWS.items()}
    pythons = sorted(set(frame["python_version"].dropna().astype(str)))
    same = bool(of_rows["torch"]) and pythons == [platform.python_version()]
    same = same and all(versions in ([], [here.get(name)]) for name, versions in of_rows.items())
    pins = {name: here[name] for name in (here if same else ANALYSIS) if name in here and name != "vramsweep"}
    several = {}
    for name, versions in () if same else of_rows.items():
        if len(versions) == 1 and _VERSION.fullmatch(versions[0]):
            pins[name] = versions[0]
        elif versions:
            several[name] = _comment(", ".join(versions))
    return latex.markdown(
        "lock.txt.j2", version=__version__, python=platform.python_version(), same=same, several=several,
        named={name: said for name in SAID if (said := _comment(values(frame, name)))}, pins=sorted(pins.items()),
    )  # fmt: skip


def _comment(said: str) -> str:
    return re.sub(r"\s+", " ", escape_text(said))
