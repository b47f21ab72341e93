"""What tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import write_tokenizer

from model_server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)
