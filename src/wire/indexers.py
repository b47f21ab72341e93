"""Which layers of a model with sparse attention have an indexer, as config.json says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Kinds of layers in `indexer_types` and `index_topk_pattern`, and whether they have one.
_KINDS = {"full": True, "F": True, "shared": False, "S": False}


def full_indexers(get: Callable[[str], Any], num_layers: int) -> tuple[bool, ...] | None:
    """Return which layers have an indexer, by `get` of the fields; None: they make no sense."""
    # Others read what the last one before them chose.
    kinds = get("indexer_types")
    if kinds is None:
        kinds = get("index_topk_pattern")
    if kinds is None:
        every, offset = get("index_topk_freq"), get("index_skip_topk_offset")
        every, offset = 1 if every is None else every, 2 if offset is None else offset
        if type(every) is not int or type(offset) is not int:
            return None
        return tuple(max(i - offset + 1, 0) % max(every, 1) == 0 for i in range(num_layers))
    if not isinstance(kinds, list | str) or len(kinds) < num_layers or any(kind not in _KINDS for kind in kinds):
        return None
    found = tuple(_KINDS[kind] for kind in kinds[:num_layers])
    return found if found[0] else None
