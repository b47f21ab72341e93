"""Adapters on a device: a fixed number of slots, filled when a request needs them."""
