"""Pages, papers and summaries of sweeps.

In: rows, fits, answers, figures. Out: HTML, LaTeX, Markdown, CSV, lines for the terminal.
It must not compute what a room below computes.
"""
