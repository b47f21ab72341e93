"""A real shard of a vision model, driven as TGI's router does it: images come as files between texts."""

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
from support.shard_process import ShardProcess
from support.vision_models import write_vision_checkpoint
from tokenizers import Tokenizer
from transformers import AutoImageProcessor

from wire.v3 import generate_pb2 as pb

pytestmark = pytest.mark.e2e
NUM_TOKENS, PER_IMAGE, BLOCK, NUM_BLOCKS = 6, 16, 16, 6


class Scene:
    def __init__(self, shard: ShardProcess, folder: Path, model: Any) -> None:
        self.stub = shard.stub
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

    def run(self, *requests: pb.Request) -> dict[int, list[int]]:
        """Tokens by request."""
        self.stub.ClearCache(pb.ClearCacheRequest(), timeout=120)
        batch = pb.Batch(id=0, requests=requests, size=len(requests), max_tokens=512, max_blocks=NUM_BLOCKS)
        tokens: dict[int, list[int]] = {}
        response = self.stub.Prefill(pb.PrefillRequest(batch=batch), timeout=120)
        while True:
            for one in response.generations:
                tokens.setdefault(one.request_id, []).extend(one.tokens.ids)
            ended = {one.request_id for one in response.generations if one.HasField("generated_text")}
            going = [i for i in response.batch.request_ids if i not in ended]
            if not going:
                return tokens
            kept = self.stub.FilterBatch(pb.FilterBatchRequest(batch_id=0, request_ids=going), timeout=120)
            response = self.stub.Decode(pb.DecodeRequest(batches=[kept.batch]), timeout=120)


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


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("llava")
    model = write_vision_checkpoint(folder, "llava")
    shard = ShardProcess(folder, tmp_path_factory.mktemp("socket") / "s")
    try:
        shard.wait_ready()
        warm_up = asked(0, "_test " * 20, b"one pixel", mimetype="image/jpeg;base64")
        batch = pb.Batch(id=0, requests=[warm_up], size=1, max_tokens=64, max_blocks=NUM_BLOCKS)
        shard.stub.Warmup(pb.WarmupRequest(batch=batch, max_prefill_tokens=512), timeout=120)
        yield Scene(shard, folder, model.eval())
    finally:
        shard.stop()


def test_a_router_that_knows_no_content_of_images_shares_no_prefixes(scene: Scene) -> None:
    info = scene.stub.Info(pb.InfoRequest(), timeout=120)
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
