"""Router and shard tokenise the same prompt on their own (`generate.v3` carries no ids): they must agree, and with
transformers, for any text, truncation and choice of special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import write_tokenizer
from transformers import AutoTokenizer

from model_server.text.tokenizer import Tokenizer
from router.text.tokenizer import PromptTokenizer
from wire import demo_model

TEXTS = (
    "Hello",
    " leading and trailing ",
    "naïve café, 日本語 and an emoji 🙂🙂",
    "</s> in the middle <s> of text",
    "line\nbreaks\r\n\tand tabs, 12345 + 67890 = ?",
    "word " * 300,
)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return demo_model.path()
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("truncate", [None, 2, 5, 64])
async def test_router_shard_and_transformers_agree(folder: Path, special: bool, truncate: int | None) -> None:
    router = PromptTokenizer.from_file(folder / "tokenizer.json", num_workers=1)
    shard = Tokenizer.load(folder)
    reference: Any = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    try:
        for text in TEXTS:
            cut = {"truncation": True, "max_length": truncate} if truncate else {}
            want = reference(text, add_special_tokens=special, **cut).input_ids
            assert await router.encode(text, add_special_tokens=special, truncate=truncate) == want
            assert shard.encode(text, add_special_tokens=special, truncate=truncate or 0) == want
    finally:
        router.close()
