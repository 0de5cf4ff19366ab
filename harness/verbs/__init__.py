"""A module for each verb: parse its words, call the rooms below, print.

In: words of a command line. Out: text or JSON on the terminal, and an exit status (vramsweep/verbs.py lists the verbs).
A verb must not call another, because code that two of them need belongs to a room below.
"""
