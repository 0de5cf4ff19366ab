"""Readers and writers of rows: journals, exports and other tools' files as one frame.

In: files. Out: a frame with every column of the registry, and warnings about it.
It must not fit or draw.
"""
