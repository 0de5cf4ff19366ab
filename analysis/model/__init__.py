"""How memory and time depend on length and batch: curves, their choice, intervals, and what fits."""
