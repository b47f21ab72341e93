"""Real shards of a vision model, driven as TGI's router does it: images come as files between texts, to every rank."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import picture
from support.running_server import free_port
from support.shard_process import ShardProcess
from support.vision_models import write_vision_checkpoint
from tokenizers import Tokenizer
from transformers import AutoImageProcessor

from wire.v3 import generate_pb2 as pb

pytestmark = pytest.mark.e2e
NUM_TOKENS, PER_IMAGE, BLOCK, NUM_BLOCKS = 6, 16, 16, 6


class Scene:
    def __init__(self, shards: list[ShardProcess], folder: Path, model: Any) -> None:
        self.stubs = [shard.stub for shard in shards]
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def expected(self, *chunks: str | bytes) -> list[int]:
        text = "".join("<image>" * PER_IMAGE if isinstance(one, bytes) else one for one in chunks)
        ids = self._tokenizer.encode(text).ids
        shown = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in chunks if isinstance(one, bytes)]
        read = self._processor(shown, return_tensors="pt", input_data_format="channels_last") if shown else {}
        with torch.no_grad():
            answer = self._model.generate(
                input_ids=torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, **read
            )
        return [int(token) for token in answer[0, len(ids) :]]

    def all_ranks(self, method: str, request: Any) -> list[Any]:
        """Their answers to one call at a time, in the order of the ranks. Raises the error of the first."""
        calls = [getattr(stub, method).future(request, timeout=120) for stub in self.stubs]
        for call in calls:
            call.exception()  # TGI's router too waits for all
        return [call.result() for call in calls]

    def run(self, *requests: pb.Request) -> dict[int, list[int]]:
        """Tokens by request: each rank says those of its own."""
        self.all_ranks("ClearCache", pb.ClearCacheRequest())
        batch = pb.Batch(id=0, requests=requests, size=len(requests), max_tokens=512, max_blocks=NUM_BLOCKS)
        tokens: dict[int, list[int]] = {}
        responses = self.all_ranks("Prefill", pb.PrefillRequest(batch=batch))
        while True:
            generations = [one for response in responses for one in response.generations]
            for one in generations:
                tokens.setdefault(one.request_id, []).extend(one.tokens.ids)
            ended = {one.request_id for one in generations if one.HasField("generated_text")}
            going = [i for i in responses[0].batch.request_ids if i not in ended]
            if not going:
                return tokens
            kept = self.all_ranks("FilterBatch", pb.FilterBatchRequest(batch_id=0, request_ids=going))[0]
            responses = self.all_ranks("Decode", pb.DecodeRequest(batches=[kept.batch]))


def asked(number: int, *chunks: str | bytes, mimetype: str = "image/png", num_blocks: int = NUM_BLOCKS) -> pb.Request:
    """As TGI's router writes it, with blocks of its own."""
    parts = [
        pb.InputChunk(text=one) if isinstance(one, str) else pb.InputChunk(image=pb.Image(data=one, mimetype=mimetype))
        for one in chunks
    ]
    first = 1 + number * NUM_BLOCKS
    blocks = list(range(first, first + num_blocks))
    return pb.Request(
        id=number, truncate=1000, add_special_tokens=True, input_chunks=pb.Input(chunks=parts), blocks=blocks,
        slots=[block * BLOCK + place for block in blocks for place in range(BLOCK)],
        parameters=pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=NUM_TOKENS),
    )  # fmt: skip


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["alone", "two ranks"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("llava")
    model = write_vision_checkpoint(folder, "llava")
    prefix, port = tmp_path_factory.mktemp("socket") / "s", free_port()
    shards = [ShardProcess(folder, prefix, rank, request.param, port) for rank in range(request.param)]
    try:
        for shard in shards:
            shard.wait_ready()
        scene = Scene(shards, folder, model.eval())
        warm_up = asked(0, "_test " * 20, b"one pixel", mimetype="image/jpeg;base64")
        batch = pb.Batch(id=0, requests=[warm_up], size=1, max_tokens=64, max_blocks=NUM_BLOCKS)
        scene.all_ranks("Warmup", pb.WarmupRequest(batch=batch, max_prefill_tokens=512))
        yield scene
    finally:
        for shard in shards:
            shard.stop()


def test_a_router_that_knows_no_content_of_images_shares_no_prefixes(scene: Scene) -> None:
    for info in scene.all_ranks("Info", pb.InfoRequest()):
        assert not info.use_prefix_caching and info.adapter_prefix_caching


def test_the_tokens_of_generate(scene: Scene) -> None:
    first, second = picture(60, 80), picture(70, 50, 3)
    prompts: list[tuple[str | bytes, ...]] = [
        ("What ", first, " is this"), ("What ", second, " is this"), ("no picture",), (first, " and ", second),
    ]  # fmt: skip
    tokens = scene.run(*(asked(number, *one) for number, one in enumerate(prompts)))
    assert tokens == {number: scene.expected(*one) for number, one in enumerate(prompts)}
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("chunks", "num_blocks", "said"),
    [
        (("What ", picture(60, 80)[:100], " is this"), NUM_BLOCKS, "request 1: invalid image: the file is damaged"),
        (("What ", b"<svg/>", " is this"), NUM_BLOCKS, "request 1: invalid image: "),
        (("What ", b"", " is this"), NUM_BLOCKS, "request 1: invalid image: the file is empty"),
        (("What ", picture(60, 80), " is this"), 1, "request 1: 16 slots for "),
        (("What <image> ", picture(60, 80)), NUM_BLOCKS, "request 1: `inputs` contains <image>, which stands for an"),
    ],
)
def test_what_cannot_run_is_said(scene: Scene, chunks: tuple[str | bytes, ...], num_blocks: int, said: str) -> None:
    """Of the call, since that router knows no errors of rows; the next call is served."""
    with pytest.raises(grpc.RpcError) as raised:
        scene.run(asked(1, *chunks, num_blocks=num_blocks))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert raised.value.details().startswith(said)
    assert scene.run(asked(0, "no picture")) == {0: scene.expected("no picture")}
