"""Mixtures of experts: routing, placing the chosen pairs in tiles, and the grouped products."""
