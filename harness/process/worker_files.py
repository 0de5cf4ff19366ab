"""Names of the files by which a worker and its parent communicate, and of records in them."""

SPEC, RESULT, STEPS, RECORDING = "spec.json", "result.json", "steps.jsonl", "recording.pickle"
LOGS = ("stdout.log", "stderr.log")
PREDICTIONS = "predictions-*.jsonl"  # of an attempt that predicts many trials: one line per answer
ANSWER = "answer.json"  # of an attempt that answers a question about trials instead of running them
PROGRESS = "progress.jsonl"  # the worker's activity, a line whenever it changes
TRACES = "traces.jsonl"  # the same of the processes that it forks to trace
ENDED = "ended"  # the record of a rank that ended without saying why
LONGEST_MESSAGE = 64 << 10  # bytes; more without an end of line is no message
