"""Settings that trade memory, time or exactness: an entry for every value of every setting.

In: a Trial. Out: its entries, with what they exclude and what they need. A new technique is an entry here and a module
under runners/techniques/. It must not import torch or any technique's package.
"""
