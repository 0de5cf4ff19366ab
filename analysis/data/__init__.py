"""Rows in, rows out: reading, importing, exporting, and which rows belong together."""
