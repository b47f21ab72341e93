"""Sequences, their batches, and the tensors of each step."""
