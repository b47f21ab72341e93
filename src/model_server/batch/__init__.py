"""Sequences, the batches they form, and the tensors built from them for each step."""
