"""Adapters on a device: a fixed number of slots, into which they are copied when a request needs them."""
