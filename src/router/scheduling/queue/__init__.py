"""Waiting requests, and how many of them the next Prefill takes."""
