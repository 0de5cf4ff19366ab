"""The parent's side: trials, the journal, processes, the allocator's model. Never imports torch."""

if __name__ == "harness":  # imported under its short name, in a checkout
    from vramsweep.alias import alias

    alias(__name__)
