"""Hydra in and out: words to resolved configurations, and a trial back to words.

In: overrides and YAML. Out: plain values of trials, words that repeat a trial, the list of settings.
It must not run anything.
"""
