"""Hydra's plugins of vramsweep: its launcher and sweepers, which Hydra finds only in this folder."""
