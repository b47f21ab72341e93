"""What a shard answers to a Warmup for which its memory does not suffice: the words that the error begins with."""

from __future__ import annotations

NOT_ENOUGH_MEMORY = "Not enough memory to handle"
"""TGI's words. A router that hears them may ask for less."""
