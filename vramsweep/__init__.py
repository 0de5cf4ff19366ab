"""vramsweep: how much GPU memory a training run takes, how fast it is, and which settings to pick.

The four packages live at the top of the repository and are linked here, so that what is installed has one name of its
own and collides with nobody's `analysis/` or `conf/`. In a checkout `harness`, `runners` and `analysis` are other names
for the same modules (alias.py).
"""

__version__ = "0.2.0"
