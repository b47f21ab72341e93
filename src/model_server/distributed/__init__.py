"""Ranks: their dimensions, groups and collectives, and how a lost rank is noticed."""
