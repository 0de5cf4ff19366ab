"""Texts that a user reads and types: errors, units, suggestions, the terminal, options, Ctrl-C.

In: values and exceptions. Out: lines of text, parsed arguments, exit statuses.
It must not know what a trial, a row or a sweep is.
"""
