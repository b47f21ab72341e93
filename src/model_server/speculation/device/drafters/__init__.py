"""Drafters that compute, on a device that the host does not wait for."""
