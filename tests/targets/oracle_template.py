"""A template (harness/process/fork_server.py) whose workers answer at once, by a curve: for nights of many trials. The
rest is ours.

Of first attempts one in fifty is killed and one in a hundred hangs, where $DISTURBED is set.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from vramsweep.runners.rank import process_end
from vramsweep.runners.worker import serve_forks, worker

KNEE, MIB = 918, 1 << 20


def curve(seq_len: int) -> int:
    """Bytes: flat, then rising, as the peak of two phases is."""
    return (10900 if seq_len < KNEE else 10900 + 3 * (seq_len - KNEE)) * MIB


def answer(folder: Path, parent: int) -> int:
    process_end.die_with_parent(parent)
    spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
    chance = random.Random(spec["trial_id"]).random() if os.environ.get("DISTURBED") and folder.name == "1" else 1.0
    time.sleep(0.05)
    if chance < 0.02:
        os.kill(os.getpid(), signal.SIGKILL)
    if chance < 0.03:
        time.sleep(600)
    values = {"peak_allocated_bytes": curve(spec["trial"]["seq_len"]), "loss_last": 1.0}
    (folder / "aside").write_text(json.dumps({"values": values}))
    (folder / "aside").rename(folder / "result.json")
    return 0


worker.main = answer
worker.preload = lambda runner: None
serve_forks.main(sys.argv[1], *map(int, sys.argv[2:5]))
