"""What a shard answers to a Warmup for which its memory does not suffice: how the error begins."""

from __future__ import annotations

NOT_ENOUGH_MEMORY = "Not enough memory to handle"
"""TGI's text. A router that reads it may ask for less."""
