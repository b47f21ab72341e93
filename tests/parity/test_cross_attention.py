"""Images of models with layers of cross attention: pictures prepared as the router does, tokens of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity.cross_scene import NEW_TOKENS, PROMPTS, CrossScene
from support.engine_shard import EngineShard, errors_of, tokens_of
from support.loading import load
from support.thread_ranks import on_ranks

from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.features.images.image import AskedImages, Feature, Image, ImagePlace


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["mllama", pytest.param("idefics", marks=pytest.mark.parity)])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CrossScene:
    return CrossScene(tmp_path_factory.mktemp(request.param), request.param)


def request(shard: EngineShard, ids: list[int], places: tuple[ImagePlace, ...], **changes: Any) -> NewRequest:
    return shard.request(ids, NEW_TOKENS, asked=(AskedImages(places),), **changes)


def test_tokens_equal_transformers_alone_and_together(scene: CrossScene) -> None:
    """Texts, one picture and several, each alone and then in one batch that they join one after another."""
    prompts = [scene.prompt(*one) for one in PROMPTS]
    expected = [scene.generate(*one, ids) for one, (ids, _) in zip(PROMPTS, prompts, strict=True)]
    assert len({tuple(one) for one in expected}) == len(expected) and len(set(expected[1])) >= 4
    for (ids, places), tokens in zip(prompts, expected, strict=True):
        shard = scene.shard()
        new = request(shard, ids, places)
        assert tokens_of(*shard.run_out(shard.prefill(0, new), 0))[new.id] == tokens, ids

    shard = scene.shard()
    requests = [request(shard, ids, places) for ids, places in prompts]
    results = [shard.prefill(0, requests[0], requests[1])]
    results += [shard.prefill(number, one, cached=0) for number, one in enumerate(requests[2:], 1)]
    found = tokens_of(*results[:-1], *shard.run_out(results[-1], 0))
    assert [found[one.id] for one in requests] == expected
    encoder = shard.encoder
    assert encoder is not None and (encoder.misses, encoder.hits) == (4, 3)


def test_penalties_know_prompts_with_pictures(scene: CrossScene) -> None:
    """The image token may be beyond the logits."""
    shard = scene.shard()
    new = request(shard, *scene.prompt(*PROMPTS[1]))
    sampling = type(new.sampling)(repetition_penalty=1.3)
    new = request(shard, *scene.prompt(*PROMPTS[1]), sampling=sampling)
    assert len(tokens_of(*shard.run_out(shard.prefill(0, new), 0))[new.id]) == NEW_TOKENS


def test_a_picture_that_cannot_be_encoded_fails_alone(scene: CrossScene) -> None:
    shard = scene.shard()
    ids, places = scene.prompt(*PROMPTS[1])
    image = places[0].image
    assert image is not None
    broken = image.features | {"pixel_values": Feature("float32", (2, 3), bytes(24))}
    bad = (ImagePlace(b"x" * 32, places[0].start, 1, Image(b"x" * 32, broken, 1)),)
    good, worse = request(shard, ids, places), request(shard, ids, bad)
    results = shard.run_out(shard.prefill(0, good, worse), 0)
    assert list(errors_of(results[0])) == [worse.id]
    results[0] = dataclasses.replace(results[0], generations=[g for g in results[0].generations if g.error is None])
    assert tokens_of(*results)[good.id] == scene.generate(*PROMPTS[1], ids)


def test_several_shards_are_refused(scene: CrossScene) -> None:
    def refusal(group: ProcessGroup) -> str:
        with torch.inference_mode(), pytest.raises(StartupError) as error:
            load(scene.folder, group=group)
        return str(error.value)

    expected = (
        f"{scene.name} needs a state for each request (its layers of cross attention read images), which cannot be "
        "divided among shards: use --num-shard 1"
    )
    assert on_ranks(2, refusal) == [expected] * 2


def test_an_image_takes_room_among_the_states(scene: CrossScene) -> None:
    """Of Mllama the keys and values of 4 tiles of 17 rows in 2 layers, of Idefics 4 rows, 32 wide, and no keys."""
    assert scene.runner.image_reserve == {"mllama": 4 * 17 + 1, "idefics": 1}[scene.name]
