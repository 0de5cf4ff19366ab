"""Few traces for many lengths and batches: sizes are exact formulas, confirmed by further traces.

In: points to predict. Out: traces of all of them, or the reason why each was traced by itself.
The room must not accept a formula that no further trace has confirmed.
"""
