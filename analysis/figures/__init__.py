"""Figures by plotly, an entry and a module each, and files of them.

In: frames and fits. Out: figures, their data, PNG and PDF.
Only here plotly is imported. It must not fit or judge anything.
"""
