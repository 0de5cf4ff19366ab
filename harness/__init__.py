"""The parent's side: what a trial is, processes that run it, the journal, sweeps, verbs.

In: the command line, YAML, JSON, rows. Out: rows in a journal, and what verbs print.
It starts the runners as processes, by name. It must not import torch, the runners or the analysis.
Rooms and what each may import: tests/test_architecture.py. Old names of modules: renames.tsv.
"""
