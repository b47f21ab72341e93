"""Drafts made and checked on the device, ahead of the host."""
