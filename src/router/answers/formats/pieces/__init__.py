"""Readers that several formats share."""
