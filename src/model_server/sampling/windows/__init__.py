"""Choices for several places of a row at once: each draws what it would draw in a step of its own."""
