"""Queues for threads and `wire.worker` processes, and freed memory."""
