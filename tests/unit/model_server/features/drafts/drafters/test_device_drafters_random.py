"""Random routers over drafters that compute on a device: growth, preemption, chunks, requests that come and go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.device_drafters import drafting_on_a_gpu, found_in
from support.effort import examples
from support.engine_shard import EngineShard
from support.loading import load
from support.tiny_drafters import base_with_two_drafters
from unit.model_server.engine.test_device_windows_random import WindowRouter
from unit.model_server.engine.test_engine_random import drive
from unit.model_server.features.drafts.drafters import test_eagle

from model_server.engine.engine import Engine
from model_server.text.tokenizer import Tokenizer

MOST = 3


class DraftedRouter(WindowRouter):
    most = MOST


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_with_two_drafters(
        tmp_path_factory.mktemp("random-device-drafters"), MOST, **test_eagle.KINDS["midlayer"]
    )


@pytest.mark.random
@pytest.mark.parametrize("seed", range(examples(1, 4)))
@pytest.mark.parametrize("kind", ["base", "medusa", "eagle"])
def test_whatever_a_router_does_each_request_says_what_it_says_alone_without_drafts(
    kind: str, seed: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`base` is the model itself: where requests are greedy all its drafts are right."""
    ahead = seed % 2 == 0
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    base, dice = root / "base", random.Random(seed)
    tokenizer, plain = Tokenizer.load(base), load(base)
    shard, asked = drafting_on_a_gpu(
        tokenizer, base, found_in(root / kind, tokenizer, base), MOST, seed, budget=dice.choice([3, 8, 40, 1000])
    )
    router = DraftedRouter([shard], dice, ahead=ahead)
    drive(router, tokenizer, lambda tokenizer: EngineShard(tokenizer, runner=plain))  # type: ignore[arg-type]
    if not router.has_grammars:  # these need the host
        assert (router.num_ahead > 3) is ahead and len(asked) > 3
