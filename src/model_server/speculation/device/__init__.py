"""Drafts that the device makes and checks by itself: the next step is launched before the host knows the tokens."""
