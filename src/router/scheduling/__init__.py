"""Decides which request runs next: queue, budgets, KV blocks and the one loop that drives the shards."""
