"""A tiny byte-level tokenizer, trained once, and routers on a fake scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from router_fakes import Router
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from router.grammar.checker import GrammarChecker
from router.template.renderer import Renderer

_TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs away again and again.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語の文章もある。",
    "def tokens(text): return [piece for piece in text.split() if piece]  # 0 1 2 3 4 5 6 7 8 9",
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE of some hundred tokens that puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXT * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="session")
def renderer() -> Iterator[Renderer]:
    """One process that renders the templates of all tests."""
    one = Renderer()
    yield one
    one.close()


@pytest.fixture(scope="session")
def grammars() -> Iterator[GrammarChecker]:
    """The processes that compile the grammars of all tests."""
    one = GrammarChecker()
    yield one
    one.close()


@pytest.fixture
def make_router(tokenizer: Tokenizer, renderer: Renderer, grammars: GrammarChecker) -> Iterator[Callable[..., Router]]:
    made: list[Router] = []

    def make(*arguments: Any, **options: Any) -> Router:
        made.append(Router(tokenizer, *arguments, **({"renderer": renderer, "grammars": grammars} | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def router(make_router: Callable[..., Router]) -> Router:
    return make_router()
