"""Images through the engine's steps, with a tower that only says which image it was asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.engine_shard import BLOCK, EngineShard, errors_of, tokens_of
from support.thread_ranks import on_ranks

from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine.sequences import CacheLayout, SequenceFactory
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.families import FAMILIES
from model_server.features.images.feature import Images
from model_server.features.images.image import AskedImages, Encoded, Feature, Image, ImagePlace
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

IMAGE_TOKEN = 9
ROWS = 3


class Tower:
    """Cannot read the images in `broken`, by their numbers."""

    family = FAMILIES["llava"]
    image_token = IMAGE_TOKEN
    row_bytes = 4

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken
        self.encoded: list[int] = []

    def encode(self, image: Image) -> Encoded:
        number = image.key[0]
        self.encoded.append(number)
        if number in self.broken:
            raise ValueError("no memory of this size")
        return Encoded(torch.full((image.num_embeds, 1), float(number)))


def with_images(shard: EngineShard, *numbers: int, **changes: object) -> NewRequest:
    """A prompt of two tokens, then each image and a token."""
    prompt, places = [1, 2], []
    for number in numbers:
        pixels = Feature("float32", (1, 1), bytes(4))
        image = Image(bytes([number]) * 32, {"pixel_values": pixels}, ROWS)
        places.append(ImagePlace(image.key, len(prompt), ROWS, image))
        prompt += [IMAGE_TOKEN] * ROWS + [3]
    return shard.request(prompt, 4, asked=(AskedImages(tuple(places)),) if places else (), **changes)


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_ranks_leave_out_the_same_request_where_one_cannot_encode(tiny_tokenizer: Tokenizer, broken_rank: int) -> None:
    """Else one would have more rows than the other, and their sums would not fit. Whichever rank answers for it says
    so, and whatever a rank has encoded and the other not, later requests with that image fail or run on both."""

    def run(group: ProcessGroup) -> tuple[dict[int, str], dict[int, list[int]], list[int]]:
        tower = Tower({7} if group.rank == broken_rank else set())
        encoder = ImageEncoder(tower, 100, group)
        shard = EngineShard(tiny_tokenizer, rank=group.rank, world_size=2, encoder=encoder)
        with torch.inference_mode():
            requests = [with_images(shard, *numbers) for numbers in ((5,), (5, 7), (), (7,))]
            first = shard.prefill(0, *requests)
            rows = shard.runner.last_inputs
            assert rows is not None
            lengths = list(rows.attention.query_lengths_host)
            results = shard.run_out(first, 0)
            tower.broken = set()
            again = with_images(shard, 7, id=10 + broken_rank)
            shard.prompts[again.id] = [1, 2, *[IMAGE_TOKEN] * ROWS, 3]
            results += shard.run_out(shard.prefill(1, again), 1)
        good = [dataclasses.replace(r, generations=[g for g in r.generations if g.error is None]) for r in results]
        return errors_of(first), tokens_of(*good), lengths

    (errors, tokens, lengths), (other_errors, other_tokens, other_lengths) = on_ranks(2, run)
    assert lengths == other_lengths == [6, 2]
    assert sorted(errors | other_errors) == [1, 3] and not set(errors) & set(other_errors)
    assert all("vision tower cannot read the image" in text for text in (errors | other_errors).values())
    assert sorted(tokens | other_tokens) == [0, 2, 10 + broken_rank]


def test_a_model_of_text_refuses_images_and_runs_the_rest(tiny_tokenizer: Tokenizer) -> None:
    shard = EngineShard(tiny_tokenizer)
    refused, served = with_images(shard, 5), with_images(shard)
    first = shard.prefill(0, refused, served)
    assert errors_of(first) == {refused.id: f"request {refused.id}: this model takes text only, not images"}
    kept = dataclasses.replace(first, generations=[g for g in first.generations if g.error is None])
    assert tokens_of(*shard.run_out(kept, 0)) == {served.id: shard.expected(served)}


def test_a_step_encodes_no_more_images_than_fit(tiny_tokenizer: Tokenizer) -> None:
    """Of 8 rows in a step a chunk takes two images of 3 and ends before the third, which opens the next."""
    tower = Tower(set())
    encoder = ImageEncoder(tower, 100)
    shard = EngineShard(tiny_tokenizer, budget=8, encoder=encoder)
    many = with_images(shard, 1, 2, 3, 4, 5, chunk_len=1)
    encoded, lengths = [], []
    with torch.inference_mode():
        result = shard.prefill(0, many)
        while result.batch is not None and len(lengths) < 5:
            result = shard.decode(0)
            assert shard.runner.last_inputs is not None
            lengths.append(shard.runner.last_inputs.attention.query_lengths_host[0])
            encoded.append(list(tower.encoded))
    # [1 2] [i i i 3] ...: a chunk of 8 tokens from the second one ends in the second image.
    assert lengths[:3] == [8, 8, 5] and encoded[:3] == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_answers_to_one_prompt_encode_its_image_once(tiny_tokenizer: Tokenizer) -> None:
    """However little room there is for what is kept, in chunks, and where one of them is computed again."""
    tower = Tower(set())
    encoder = ImageEncoder(tower, 1)
    shard = EngineShard(tiny_tokenizer, budget=4, encoder=encoder)
    with torch.inference_mode():
        first, second, third = [with_images(shard, 5, chunk_len=4) for _ in range(3)]
        results = [shard.prefill(0, first, second), shard.prefill(1, third, cached=0)]
        results += shard.run_out(results.pop(), 0)
        tokens = tokens_of(*results)
        assert len({tuple(tokens[one.id]) for one in (first, second, third)}) == 1
        assert tower.encoded == [5] and encoder.num_rows == ROWS
        again = with_images(shard, 5, id=9, resume_ids=tuple(tokens[first.id][:2]))
        shard.prompts[9] = shard.prompts[first.id]
        assert tokens_of(*shard.run_out(shard.prefill(2, again), 2))[9] == tokens[first.id][2:]
    assert tower.encoded == [5]


@pytest.mark.parametrize("family", ["llava", "mllama"])
def test_penalties_see_no_token_where_an_image_has_no_logits(tiny_tokenizer: Tokenizer, family: str) -> None:
    """The image token is behind the text model's vocabulary: nothing is repeated by it, not even token 0, which
    is there where nothing else is."""
    tower = Tower(set())
    tower.family = FAMILIES[family]
    shard = EngineShard(tiny_tokenizer, encoder=ImageEncoder(tower, 100))
    sampler = Sampler(IMAGE_TOKEN, torch.device("cpu"))
    images = Images(ImageEncoder(tower), IMAGE_TOKEN)
    factory = SequenceFactory(tiny_tokenizer, sampler, IMAGE_TOKEN, False, lambda request_id: True, features=(images,))
    rows = ROWS if family == "llava" else 1
    pixels = {name: Feature("float32", (1, 1), bytes(4)) for name in tower.family.features}
    for prompt, seen in (([1, *[IMAGE_TOKEN] * rows, 3], [1, 3, 4]), ([IMAGE_TOKEN] * rows, [0, 4])):
        start = prompt.index(IMAGE_TOKEN)
        place = ImagePlace(bytes(32), start, rows, Image(bytes(32), pixels, rows))
        penalised = SamplingParameters(repetition_penalty=1.2)
        one = shard.request(prompt, 4, asked=(AskedImages((place,)),), sampling=penalised, resume_ids=(4,), tokens=64)
        layout = CacheLayout(block_size=BLOCK, num_blocks=64, chunking=False, grows=False)
        (sequence,), refused = factory.sequences([one], layout)
        history = sequence.row.history
        assert not refused and history is not None
        assert history[: sequence.row.num_prompt + sequence.row.num_generated].tolist() == seen
