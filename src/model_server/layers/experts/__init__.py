"""Mixtures of experts: the ways to run them, and which suits a device."""
