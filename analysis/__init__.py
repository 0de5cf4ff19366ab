"""Reads rows only: fits, figures, reports."""

if __name__ == "analysis":  # imported under its short name, in a checkout
    from vramsweep.alias import alias

    alias(__name__)
