"""A real GPU does not say what it ran too early."""

from __future__ import annotations

import collections

errors: list[str] = []
waits: collections.Counter[str] = collections.Counter()
