"""Carries out the router's calls, one step after the other, on the device thread."""
