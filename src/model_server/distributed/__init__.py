"""Ranks: the process group, its collectives, and noticing that a rank is lost."""
