"""Windows that the device makes beside images: what penalties see is what they see without drafts."""

from __future__ import annotations

import random

import pytest
import torch
from support.device_windows import Dice, guessing, on_a_gpu
from support.engine_shard import EngineShard
from unit.model_server.engine.test_device_windows import said
from unit.model_server.engine.test_engine_images import Tower

from model_server.batch.sequence import NewRequest
from model_server.engine.engine import Engine
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.image import AskedImages, Feature, Image, ImagePlace
from model_server.sampling.parameters import SamplingParameters
from model_server.text.tokenizer import Tokenizer

ROWS = 5


def requests(shard: EngineShard, image_token: int) -> list[NewRequest]:
    found = []
    for number in range(4):
        image = Image(bytes([number]) * 32, {"pixel_values": Feature("float32", (1, 1), bytes(4))}, ROWS)
        sampling = SamplingParameters(
            do_sample=True, temperature=2.0, seed=number, presence_penalty=3.0, repetition_penalty=1.5
        )
        prompt = [5 + number, *[image_token] * ROWS, 7, 8]
        found.append(
            shard.request(prompt, 16, asked=(AskedImages((ImagePlace(image.key, 1, ROWS, image),)),), sampling=sampling)
        )
    return found


@pytest.mark.parametrize("without_logits", [False, True])
def test_penalties_beside_images_are_those_without_drafts(
    tiny_tokenizer: Tokenizer, without_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the image token has no logits, penalties see a shorter text than the device's histories have."""
    tower = Tower(set())
    tower.image_token = tiny_tokenizer.vocab_size if without_logits else 9
    with torch.inference_mode():
        plain = EngineShard(tiny_tokenizer, budget=1000, encoder=ImageEncoder(tower, 100))
        wanted = said(plain, requests(plain, tower.image_token), ahead=False)
        monkeypatch.setattr(Engine, "_runs_ahead", True)
        dice = random.Random(0)
        speculator = Dice(5, dice, guessing(tiny_tokenizer.vocab_size, dice, 0.2))
        shard = on_a_gpu(tiny_tokenizer, speculator, encoder=ImageEncoder(tower, 100))  # type: ignore[arg-type]
        assert said(shard, requests(shard, tower.image_token), ahead=True) == wanted
    assert (speculator.num_windows > 0) is not without_logits
