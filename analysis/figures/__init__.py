"""Figures: the only room that draws."""
