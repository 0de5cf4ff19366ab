"""Few traces for many lengths and batches: sizes as exact formulas, confirmed by further traces.

In: points to predict. Out: traces of all of them, or the reason why each was traced by itself.
It must not believe a formula that no further trace has confirmed.
"""
