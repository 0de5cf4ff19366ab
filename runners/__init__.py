"""The child's side: everything that imports torch."""

if __name__ == "runners":  # imported under its short name, in a checkout
    from vramsweep.alias import alias

    alias(__name__)
