"""Random routers over drafters that compute where the host makes the windows: growth, preemption, chunks, leavers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.device_windows import NUM_BLOCKS
from support.drafted_shard import FREE, MOST, shard_of
from support.drafts import speculator_of
from support.effort import examples
from support.engine_shard import EngineShard
from support.loading import load
from support.tiny_drafters import base_with_two_drafters
from unit.model_server.engine.test_device_windows_random import WindowRouter
from unit.model_server.engine.test_engine_random import drive
from unit.model_server.features.drafts.drafters import test_eagle

from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.pace import Pace
from model_server.sampling.parameters import SamplingParameters
from model_server.text.tokenizer import Tokenizer

# With the second one no draft pays.
PACES = [FREE, Pace([(1, 1.0), (2, 2.0), (8, 8.0)]), Pace([(1, 1.0), (8, 1.5), (16, 9.0)])]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_with_two_drafters(tmp_path_factory.mktemp("random-host-drafters"), MOST, **test_eagle.KINDS["midlayer"])


@pytest.mark.parametrize("seed", range(examples(2, 12)))
@pytest.mark.parametrize("kind", ["base", "medusa", "eagle"])
def test_whatever_a_router_does_each_request_says_what_it_says_alone_without_drafts(
    kind: str, seed: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`base` is the model itself: where requests are greedy all its drafts are right."""
    base, dice = root / "base", random.Random(seed)
    tokenizer, plain = Tokenizer.load(base), load(base)
    shard, asked = shard_of(
        tokenizer, base, root / kind, budget=dice.choice([3, 8, 40, 1000]), grows=True, num_blocks=NUM_BLOCKS
    )
    speculator = speculator_of(shard.engine)
    assert isinstance(speculator, DeviceModelSpeculator)
    window = speculator.window

    def at_another_pace(rows, compute):  # type: ignore[no-untyped-def]
        speculator.pace = dice.choice(PACES)
        return window(rows, compute)

    monkeypatch.setattr(speculator, "window", at_another_pace)
    monkeypatch.setattr(speculator, "length", lambda *_: dice.randint(0, MOST))
    router = WindowRouter([shard], dice)
    drive(router, tokenizer, lambda tokenizer: EngineShard(tokenizer, runner=plain))  # type: ignore[arg-type]
    assert asked
    if kind != "base":
        return
    greedy = [
        router.shard.prompts[key] + router.said[key]
        for key, request in router.requests.items()
        if request.sampling == SamplingParameters()
    ]
    for ids, forced, draft in asked:
        known = [*ids, *forced]
        for said in (one for one in greedy if one[: len(known)] == known):
            assert all(a == b for a, b in zip(draft, said[len(known) :], strict=False)), (known, draft, said)
