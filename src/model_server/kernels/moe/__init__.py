"""Mixtures of experts: routing, tiles of chosen pairs, and grouped products."""
