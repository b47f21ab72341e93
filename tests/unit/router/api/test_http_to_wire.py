"""Whatever the HTTP routes accept can be put on the wire: no request of a batch can keep the others from being sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
from router_fakes import Router, is_invalid

from router.config import RouterConfig
from router.shards import convert
from router.shards.interface import NewBatch, NewRequest, PrefillCall
from wire.v3 import generate_pb2 as pb

TEXTS = ["Hello", "\x00", "\uffff\ufffe", "\U0010ffff", "é🙂", "\u2028\x7f", "</s>", "x" * 4000, " "]
FLOAT32 = [1e-45, 1.4e-45, 1e-38, 3.4028234663852886e38, -3.4028234663852886e38, -0.0, 0.0, 1e-320, 5e-324]
UNIT = [1e-45, 0.5, 1, 0.9999999999999999, 0.99999999, 1.0000000000000002]
PENALTY = [-2, 2, 2.0000000000000004, -1e-45, 0.1]
IDS = ["0", "399", "+5", " 7 ", "1_0", "\uff15", "-0", "00000000012"]
GRAMMARS: list[Any] = [
    {"type": "regex", "value": "\x00|é|🙂|\uffff"},
    {"type": "json", "value": {"type": "object", "properties": {"\x00\uffff🙂": {"const": 1e308}}}},
    {"type": "json", "value": '{"enum": ["\\ud83d\\ude00", 1.0]}'},
    {"type": "json", "value": '{"enum": ["\\ud83d"]}'},
    {"type": "json_object"},
    {"type": "text"},
]


def sampling(source: random.Random) -> dict[str, Any]:
    """A few fields that the native and the OpenAI routes share, with values at and around their edges."""
    choices: dict[str, list[Any]] = {
        "temperature": [*FLOAT32, 1, 2],
        "top_p": UNIT,
        "typical_p": UNIT,
        "min_p": [*UNIT, 0],
        "repetition_penalty": FLOAT32,
        "frequency_penalty": PENALTY,
        "presence_penalty": PENALTY,
        "top_k": [1, 2**31 - 1],
        "seed": [0, 2**63, 2**64 - 1],
        "min_tokens": [0, 1, 2**32 - 1],
        "ignore_eos": [True],
        "stop": [[source.choice(TEXTS) for _ in range(source.randrange(4))]],
    }
    return {name: source.choice(values) for name, values in choices.items() if source.random() < 0.2}


def native(source: random.Random) -> Any:
    more = {
        "max_new_tokens": [1, 2**32 - 1],
        "truncate": [1, 2000],
        "top_n_tokens": [0, 5],
        "best_of": [1, 2],
        "watermark": [True],
        "do_sample": [True],
        "decoder_input_details": [True],
        "grammar": GRAMMARS,
    }
    parameters = sampling(source) | {name: source.choice(v) for name, v in more.items() if source.random() < 0.15}
    return {"inputs": source.choice(TEXTS), "parameters": parameters}


def openai(source: random.Random) -> dict[str, Any]:
    bias = {key: source.choice([-100, 100, 1e-45, 0]) for key in source.sample(IDS, source.randrange(3))}
    return sampling(source) | {"logit_bias": bias, "n": source.choice([1, 2]), "max_tokens": source.choice([1, None])}


def completion(source: random.Random) -> Any:
    prompts = [source.choice(TEXTS), [0, 399], [[5], [6, 255]], [255] * 3]
    return openai(source) | {"prompt": source.choice(prompts), "logprobs": source.choice([None, 0, 5])}


def chat(source: random.Random) -> Any:
    form = {"response_format": source.choice(GRAMMARS)} if source.random() < 0.2 else {}
    return openai(source) | form | {"messages": [{"role": "user", "content": source.choice(TEXTS)}]}


def infer(source: random.Random) -> Any:
    one = {"name": "x", "shape": [1], "datatype": "BYTES", "data": list(source.choice(TEXTS).encode())}
    return {"id": "1", "inputs": [one], "outputs": [{"name": "x"}], "parameters": native(source)["parameters"]}


ROUTES = [
    ("/generate", native),
    ("/generate_stream", native),
    ("/v1/completions", completion),
    ("/v1/chat/completions", chat),
    ("/v2/models/m/versions/1/infer", infer),
]


async def test_what_is_let_in_can_be_sent(make_router: Callable[..., Router]) -> None:
    router = make_router(config=RouterConfig(kserve_api=True))
    source = random.Random(3)
    for _ in range(300):
        path, body = source.choice(ROUTES)
        answer = await router.post(path, raw=orjson.dumps(body(source)))
        assert answer.status_code == 200 or is_invalid(answer), answer.text
    assert len(router.scheduler.submitted) > 60
    for number, request in enumerate(router.scheduler.submitted):
        new = NewRequest(number, request, blocks=[1], cache_len=0)
        call = convert.prefill_to(PrefillCall(NewBatch(number, [new])))
        (sent,) = pb.PrefillRequest.FromString(call.SerializeToString()).batch.requests
        assert sent.parameters.seed == request.sampling.seed
        assert sent.parameters.temperature > 0 and sent.parameters.top_p > 0 and sent.parameters.typical_p > 0
        assert sent.parameters.repetition_penalty > 0, "nothing that is on becomes off on the way"
        assert tuple(sent.input_ids) == request.input_ids
        again = convert.prefill_to(PrefillCall(NewBatch(number, [replace(new, resume_ids=[1, 2])])))
        assert again.ByteSize() > 0
