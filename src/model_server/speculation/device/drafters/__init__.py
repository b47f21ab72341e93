"""Drafters that compute on the device, ahead of the host."""
