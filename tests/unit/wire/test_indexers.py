"""Which layers have an indexer: as transformers reads a config.json."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GlmMoeDsaConfig

from wire.indexers import full_indexers

LAYERS = 9


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"index_topk_freq": 3},
        {"index_topk_freq": 0},
        {"index_topk_freq": 4, "index_skip_topk_offset": 1},
        {"index_topk_freq": 2, "index_skip_topk_offset": 5},
        {"index_topk_pattern": "FFSSSFSSF"},
        {"index_topk_pattern": ["full", "shared"] * 4 + ["full"], "index_topk_freq": 3},
        {"indexer_types": ["full"] * 3 + ["shared"] * 6, "index_topk_pattern": "FFFFFFFFF"},
    ],
)
def test_as_transformers(said: dict[str, Any]) -> None:
    theirs = GlmMoeDsaConfig(num_hidden_layers=LAYERS, **said).indexer_types
    assert theirs is not None
    assert full_indexers(said.get, LAYERS) == tuple(kind == "full" for kind in theirs)


@pytest.mark.parametrize(
    "said",
    [
        {"indexer_types": ["full"] * 8},
        {"indexer_types": ["full"] * 8 + ["half"]},
        {"indexer_types": ["shared"] + ["full"] * 8},
        {"indexer_types": 9},
        {"index_topk_pattern": "FFFFXFFFF"},
        {"index_topk_freq": "2"},
        {"index_skip_topk_offset": 1.5},
    ],
)
def test_what_makes_no_sense(said: dict[str, Any]) -> None:
    assert full_indexers(said.get, LAYERS) is None
