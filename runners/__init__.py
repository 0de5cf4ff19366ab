"""The child process's side, and everything that imports torch: building, training, measuring, tracing, predicting.

In: a spec file, which may ask a question. Out: a result file.
It must not start sweeps, write the journal or import the analysis.
Rooms and what each may import: tests/test_architecture.py. Old names of modules: renames.tsv.
"""
