"""Carries out the router's calls one by one, on the device thread."""
