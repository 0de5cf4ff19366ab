"""Names of the files by which a worker and its parent speak, and of records in them."""

from __future__ import annotations

SPEC, RESULT, STEPS, RECORDING = "spec.json", "result.json", "steps.jsonl", "recording.pickle"
LOGS = ("stdout.log", "stderr.log")
PREDICTIONS = "predictions-*.jsonl"  # of an attempt that predicts many trials: answers, a line each
ANSWER = "answer.json"  # of an attempt that is asked about trials, instead of running them
PROGRESS = "progress.jsonl"  # what the worker does, a line whenever that changes
ENDED = "ended"  # the record of a rank that ended without saying why
LONGEST_MESSAGE = 64 << 10  # bytes without an end of line that are no message any more
