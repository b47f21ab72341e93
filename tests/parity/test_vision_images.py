"""Images through the engine, against transformers' whole models: greedy tokens in float32."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.library import THINKERS, with_talker
from parity.vision_ranks import VisionRanks
from parity.vision_scene import BLOCK, VisionScene, request
from safetensors.torch import load_file, save_file
from support.drafts import drafts_in, use_drafts
from support.effort import examples
from support.engine_shard import EngineShard, errors_of, tokens_of
from support.loading import CPU, load
from support.pictures import picture as file
from support.vision_models import CONFIGS, MODEL_TYPES, write_vision_checkpoint

from model_server.attention.choice import AttentionChoice
from model_server.batch.sequence import NewRequest
from model_server.errors import StartupError
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.drafters.draft_model import DraftModel
from model_server.features.drafts.drafters.drafter import DraftedRunner
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.speculator import Speculator
from model_server.features.images.families import FAMILIES
from model_server.features.images.image import AskedImages, EncodedImages, Feature
from model_server.features.images.tower import load_tower
from wire.images.families import FAMILIES as FAMILIES_OF_PROMPTS
from wire.images.preparing import Preparer

SERVED = [name for name in CONFIGS if name in FAMILIES or name in MODEL_TYPES]
ALWAYS = ("llava", "qwen2_vl")
MODELS = [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.parity) for one in SERVED]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=MODELS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionScene:
    return VisionScene(tmp_path_factory.mktemp(request.param), request.param)


def alone(shard: EngineShard, new: NewRequest) -> list[int]:
    """The tokens of a request that runs alone."""
    return tokens_of(*shard.run_out(shard.prefill(0, new), 0))[new.id]


def logits_of(shard: EngineShard) -> list[torch.Tensor]:
    """Filled with what the model of `shard` gives from now on."""
    seen: list[torch.Tensor] = []
    forward = shard.runner.forward

    def noting(inputs: Any, cache: Any) -> torch.Tensor:
        logits = forward(inputs, cache)
        seen.append(logits.clone())
        return logits

    shard.runner.forward = noting  # type: ignore[method-assign]
    return seen


def test_tokens_and_logits_equal_transformers(scene: VisionScene) -> None:
    """None, one and two pictures with text between; another picture gives other tokens."""
    answers = []
    for numbers in ((), (0,), (1, 0), (2,)):
        prompt = scene.prompt(numbers)
        expected, logits = scene.answer(prompt)
        shard = scene.shard()
        seen = logits_of(shard)
        assert alone(shard, request(shard, prompt)) == expected, numbers
        assert (torch.cat(seen) - logits).abs().max() < 1e-4 * logits.abs().max(), numbers
        answers.append(tuple(expected))
    assert len(set(answers)) == len(answers) and len(set(answers[1])) >= 4


def test_attention_by_operators_gives_the_same_tokens(scene: VisionScene) -> None:
    """Where there are any. Prompts with images beside text, in steps of their own and in one with rows that decode."""
    prompts = [scene.prompt((0, 1)), scene.prompt(()), scene.prompt((2,))]
    shard = scene.shard(backend=AttentionChoice(None, CPU).for_layers())
    requests = [request(shard, one) for one in prompts]
    results = [shard.prefill(0, requests[0], requests[1]), shard.decode(0), shard.prefill(1, requests[2], cached=0)]
    found = tokens_of(*results[:-1], *shard.run_out(results[-1], 0))
    assert [found[one.id] for one in requests] == [scene.generate(one) for one in prompts]


def test_chunks_and_other_rows_change_nothing(scene: VisionScene) -> None:
    """Small budgets, so that chunks end within images, beside text that joins and leaves."""
    prompts = [scene.prompt((0, 1)), scene.prompt(()), scene.prompt((2,))]
    expected = [alone(shard, request(shard, one)) for one in prompts for shard in [scene.shard()]]
    whole = scene.name.startswith("paligemma")  # whose prompts are not cut
    for budget, first in ((10_000, 10_000),) if whole else ((3, 2), (7, 5), (16, 11)):
        shard = scene.shard(budget=budget)
        requests = [request(shard, one, chunk_len=scene.first_chunk(one, first)) for one in prompts]
        results = [shard.prefill(0, requests[0])]
        results += [shard.prefill(number, one, cached=0) for number, one in enumerate(requests[1:], 1)]
        found = tokens_of(*results[:-1], *shard.run_out(results[-1], 0))
        assert [found[one.id] for one in requests] == expected, budget
        encoder = shard.encoder
        assert encoder is not None and encoder.misses == 3 and encoder.num_rows > 0


def test_chunks_of_random_lengths_change_nothing(scene: VisionScene) -> None:
    """First chunks and budgets at random, of prompts that join at random steps."""
    if scene.name.startswith("paligemma"):
        pytest.skip("its prompts are not cut")
    source = random.Random(scene.name)
    prompts = [scene.prompt((0, 1)), scene.prompt(()), scene.prompt((2,))]
    expected = [scene.generate(one) for one in prompts]
    for _ in range(examples(1, 6)):
        shard = scene.shard(budget=source.randrange(1, 24))
        waiting = [
            request(shard, one, chunk_len=scene.first_chunk(one, source.randrange(1, len(one.ids)))) for one in prompts
        ]
        results = [shard.prefill(0, waiting[0])]
        for number, one in enumerate(waiting[1:], 1):
            results += [shard.decode(0) for _ in range(source.randrange(5))]  # fewer than the first one's tokens
            results.append(shard.prefill(number, one, cached=0))
        results += shard.run_out(results.pop(), 0)
        found = tokens_of(*results)
        assert [found[one.id] for one in waiting] == expected


def test_preempted_requests_go_on(scene: VisionScene) -> None:
    """In the middle of an image and behind all of them; what is in the cache is not sent again."""
    prompt = scene.prompt((0, 1))
    shard = scene.shard()
    expected = alone(shard, request(shard, prompt))
    for resumed in (0, 4):
        shard = scene.shard()
        again = request(shard, prompt, resume_ids=tuple(expected[:resumed]))
        assert alone(shard, again) == expected[resumed:]

    shard = scene.shard()
    inside = prompt.places[1].start + prompt.places[1].length // 2
    stops = (prompt.places[0].start + 1, prompt.places[0].stop, inside, len(prompt.ids) - 1)
    states = shard.runner.traits.recurrent
    saves = {} if states is None else {stop // BLOCK * BLOCK: 8 + number for number, stop in enumerate(stops)}
    if states is not None:
        states.reserve(8 + len(stops))
    first = request(shard, prompt, state_saves=tuple(saves.items()))
    assert alone(shard, first) == expected
    for stop in stops:
        cached = stop // BLOCK * BLOCK
        sent = tuple(
            dataclasses.replace(p, image=dataclasses.replace(p.image, features={}))
            if p.stop <= cached and p.image is not None
            else p
            for p in prompt.places
        )
        shared = dataclasses.replace(
            first,
            id=100 + stop,
            cache_len=cached,
            asked=(AskedImages(sent),),
            state_from=saves.get(cached),
            state_saves=(),
        )
        shard.prompts[shared.id] = prompt.ids
        assert alone(shard, shared) == expected, cached
    encoder = shard.encoder
    assert encoder is not None and encoder.misses == 2 and encoder.hits > 0

    shard.prompts[99] = prompt.ids
    again = shard.prefill(1, dataclasses.replace(first, id=99))  # the blocks are the same, their content too
    assert again.reports == (EncodedImages(hits=2),)


def test_drafts_change_nothing(scene: VisionScene) -> None:
    """All of the answer is foretold, so that windows check several places behind the images."""
    prompt = scene.prompt((1, 0))
    shard = scene.shard()
    if not shard.runner.traits.continues_from_blocks:
        pytest.skip("nothing is drafted where states cannot go back")
    expected = alone(shard, request(shard, prompt))
    shard = scene.shard()
    speculator = Speculator(3)
    speculator.pace = Pace([(1, 1.0)])
    use_drafts(shard.engine, speculator)
    new = request(shard, prompt, prediction_ids=tuple(expected))
    results = shard.run_out(shard.prefill(0, new), 0)
    assert tokens_of(*results)[new.id] == expected
    assert sum(r.num_right for r in drafts_in(results)) >= 4


def test_a_draft_model_changes_nothing(scene: VisionScene) -> None:
    """The text model drafts for itself: with the ids of image tokens, at the places of the cache."""
    prompts = [scene.prompt((1, 0)), scene.prompt(())]
    base: Any = load(scene.folder)
    if not base.traits.continues_from_blocks:
        pytest.skip("nothing is drafted where states cannot go back")
    drafter = DraftModel(load(scene.folder), base)
    shard = scene.shard(runner=DraftedRunner(base, drafter))
    speculator = DeviceModelSpeculator(3, 128, torch.device("cpu"), BLOCK, drafter, alone=True)
    speculator.pace, drafter.pace = Pace([(1, 1.0)]), Pace([(1, 0.01)])
    use_drafts(shard.engine, speculator)
    requests = [request(shard, one) for one in prompts]
    results = [shard.prefill(0, requests[0]), shard.prefill(1, requests[1], cached=0)]
    results += shard.run_out(results.pop(), 0)
    found = tokens_of(*results)
    assert [found[one.id] for one in requests] == [scene.generate(one) for one in prompts]
    assert sum(r.num_tokens for r in drafts_in(results)) >= 4


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [1, 2], ids=["shards", "stages"])
def test_two_ranks_give_the_tokens_of_one(scene: VisionScene, two_ranks: VisionRanks, num_stages: int) -> None:
    if num_stages == 2 and scene.name == "gemma4_small":
        pytest.skip("its last layers read the keys of one before a cut in the middle")
    prompts = [scene.prompt((0, 1)), scene.prompt(()), scene.prompt((1, 0))]
    assert two_ranks.said(scene, num_stages, prompts) == [scene.generate(one) for one in prompts]


def test_an_image_that_cannot_be_encoded_fails_alone(scene: VisionScene) -> None:
    good, bad = scene.prompt((0,)), scene.prompt((1,))
    place = bad.places[0]
    assert place.image is not None
    pixels = place.image.features["pixel_values"]
    broken = Feature("float32", (1, math.prod(pixels.shape) - 1), pixels.data[:-4])
    image = dataclasses.replace(place.image, features={**place.image.features, "pixel_values": broken})
    bad = dataclasses.replace(bad, places=[dataclasses.replace(place, image=image)])
    shard = scene.shard()
    requests = [request(shard, good), request(shard, bad), request(shard, scene.prompt(()))]
    results = shard.run_out(shard.prefill(0, *requests), 0)
    errors = errors_of(results[0])
    assert list(errors) == [requests[1].id] and "image" in errors[requests[1].id]
    results[0] = dataclasses.replace(results[0], generations=[g for g in results[0].generations if g.error is None])
    other = scene.shard()
    assert tokens_of(*results)[requests[0].id] == alone(other, request(other, good))


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_part_of_a_model_that_speaks_reads_images(model_type: str, tmp_path: Path) -> None:
    """As public files hold it, beside what speaks."""
    scene = VisionScene(tmp_path, THINKERS[model_type])
    prompt = scene.prompt((0, 1))
    expected = scene.generate(prompt)
    with_talker(model_type, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {f"thinker.{name}" for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")} <= set(
        tensors
    )
    assert {name.split(".")[1] for name in tensors if name.startswith("thinker.")} == {
        "audio_tower", "lm_head", "model", "visual",
    }  # fmt: skip
    shard = scene.shard()
    assert alone(shard, request(shard, prompt)) == expected
    made = Preparer(tmp_path, "float32").prepare(bytes(32), file(80, 120), max_pixels=10**6)
    assert made.num_embeds == made.expansion.count(FAMILIES_OF_PROMPTS[THINKERS[model_type]].image_token) > 0


@pytest.mark.parametrize("said", ["does not exist", "has another shape"])
def test_a_tower_that_is_not_whole_is_refused(said: str, tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, "llava")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("multi_modal_projector.linear_1.weight"))
    del tensors[name]
    if said == "has another shape":
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=f"linear_1.weight {said}"):
        load_tower(tmp_path, "llava", FAMILIES["llava"], torch.device("cpu"), torch.float32)
