"""Mixtures of experts: ways to run them, by device."""
