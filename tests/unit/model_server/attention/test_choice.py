"""Words for attention backends."""

from __future__ import annotations

import logging

import pytest
import torch

from model_server.attention.choice import TGI_NAMES, select_backend
from model_server.errors import StartupError

CPU = torch.device("cpu")


def test_unset_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = select_backend(None, CPU)
    assert (backend.name, backend.tgi_name, backend.block_size) == ("reference", "paged", 16)
    assert not caplog.records


@pytest.mark.parametrize("word", TGI_NAMES)
def test_tgis_words_mean_the_best_present(word: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert select_backend(word, CPU).name == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        f"Attention `{word}` is served by the `reference` backend on cpu"
    ]


def test_unknown_word() -> None:
    with pytest.raises(StartupError, match="--attention sparse is unknown; choose one of reference, paged"):
        select_backend("sparse", CPU)
