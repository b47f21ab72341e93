"""Ranks: a place in each dimension, the groups and their collectives, and how the loss of a rank is noticed."""
