"""Settings that trade memory, time or exactness: an entry for every value of every setting.

In: a Trial. Out: what its entries are, what they exclude, what they need. A new technique is an entry here and a module
under runners/techniques/. It must not import torch or any technique's package.
"""
