"""Queues of work for threads and for processes of `wire.worker`, and memory given back."""
