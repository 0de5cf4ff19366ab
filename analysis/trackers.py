"""Log a finished sweep to MLflow, W&B or trackio: one run per trial. None of them is needed for anything else."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pandas as pd

from analysis.load import ASKED, FOUND, Table
from harness.errors import UserError
from harness.row import COLUMNS

_RESULTS = tuple(c.name for c in COLUMNS if c.group in ("memory", "speed", "health") and c.type in (int, float))


def log(table: Table, tracker: str, project: str) -> int:
    """Log every trial as a finished run with its settings and scalar results; returns how many.

    Raises UserError when the tracker's package is not installed.
    """
    try:
        module: Any = importlib.import_module(tracker)
    except ImportError:
        raise UserError(f"{tracker} is not installed; pip install {tracker}") from None
    if tracker == "mlflow":
        module.set_experiment(project)
    for _, row in table.frame.iterrows():
        settings = {
            k: str(row[k]) for k in (*ASKED, "seq_len", "seed", "repeat", "outcome", *FOUND) if not pd.isna(row[k])
        }
        results = {k: float(row[k]) for k in _RESULTS if not pd.isna(row[k]) and math.isfinite(float(row[k]))}
        if tracker == "mlflow":
            with module.start_run(run_name=str(row["trial_id"])):
                module.log_params(settings)
                module.log_metrics(results)
        else:  # trackio keeps to W&B's calls
            run = module.init(project=project, name=str(row["trial_id"]), config=settings)
            run.log(results)
            run.finish()
    return len(table.frame)
