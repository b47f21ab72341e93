"""Ranks: a place in each dimension, the groups and their collectives, and noticing that a rank is lost."""
