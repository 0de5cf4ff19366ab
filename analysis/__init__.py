"""The analysis: fits, comparisons, answers, figures and reports of rows.

In: rows of any journal, or of other tools. Out: tables, figures, pages.
It must not import the runners, nor change a row.
Rooms, in the order in which they may import: data, model, compare, answers, figures, report.
"""
