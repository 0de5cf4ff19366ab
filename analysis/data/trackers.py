"""Log a finished sweep to MLflow, W&B or trackio: one run per trial. None of them is needed for anything else."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import ASKED, FOUND
from vramsweep.analysis.data.load import EXTRA, Table
from vramsweep.harness.errors import UserError
from vramsweep.harness.row import COLUMNS

_RESULTS = tuple(c.name for c in COLUMNS if c.group in ("memory", "speed", "health") and c.type in (int, float))


def log(table: Table, tracker: str, project: str) -> int:
    """Log every trial as a finished run with its settings and scalar results; returns how many.

    Raises UserError when the tracker's package is not installed, or with what the tracker objects to.
    """
    try:
        module: Any = importlib.import_module(tracker)
    except ImportError:
        raise UserError(f"{tracker} is not installed; pip install {tracker}") from None
    extras = [name for name in table.frame.columns if str(name).startswith(EXTRA)]
    names = [*ASKED, "seq_len", "seed", "repeat", "outcome", *FOUND, *extras]
    try:
        if tracker == "mlflow":
            module.set_experiment(project)
        for _, row in table.frame.iterrows():
            settings = {k: v.item() if isinstance(v, np.generic) else v for k in names if not pd.isna(v := row[k])}
            results = {k: float(row[k]) for k in _RESULTS if not pd.isna(row[k])}
            if tracker == "mlflow":
                with module.start_run(run_name=str(row["trial_id"])):
                    module.log_params(settings)
                    module.log_metrics(results)
            else:  # trackio keeps to W&B's calls
                run = module.init(project=project, name=str(row["trial_id"]), config=settings)
                run.log(results)
                run.finish()
    except Exception as error:  # theirs: no server, no login, a store that is no longer supported
        raise UserError(f"{tracker} says: {(str(error).strip() or type(error).__name__).splitlines()[0]}") from None
    return len(table.frame)
