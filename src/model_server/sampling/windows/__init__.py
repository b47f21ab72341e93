"""Choices at several places of a row, each as in a step of its own."""
