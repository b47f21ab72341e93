from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from support.scripted_http import ScriptedServer

from launcher.bench.load import Progress
from launcher.bench.made_up_prompts import MadeUpPrompts, vocabulary_of
from launcher.bench.replay import Counts, Replay, Request, cache_counters, comparison, hit_rate, requests_of
from launcher.bench.replay_log import Arrival, Hashed, Recording
from launcher.http_stream import Connection

ARRIVALS = [
    Arrival(at_s=0, path="/v1/completions", body=b'{"model":"a", "prompt":"p","stream":true}'),
    Arrival(at_s=1, path="/generate", body=b'{"inputs" : "p"}'),
    Arrival(at_s=2, hashed=Hashed(hash_ids=[1], num_tokens=3, block=64, output_tokens=0)),
]


def test_what_is_sent() -> None:
    made_up = MadeUpPrompts([7], 0)
    whole, plain, made = requests_of(Recording(arrivals=ARRIVALS), 4.0, "b", made_up, {"model": "b", "stream": True})
    usage = {"include_usage": True}
    assert orjson.loads(whole.body) == {"model": "b", "prompt": "p", "stream": True, "stream_options": usage}
    assert (plain.body, plain.is_stream, plain.at_s) == (ARRIVALS[1].body, False, 0.25)
    assert orjson.loads(made.body) == {"model": "b", "stream": True, "prompt": [7] * 3, "max_tokens": 1}
    assert (made.at_s, made.path, made.is_stream) == (0.5, "/v1/completions", True)


async def test_a_replay_counts_what_comes_back(
    server: ScriptedServer, events: Callable[..., bytes], answer: Callable[..., bytes]
) -> None:
    text = b'{"choices":[{"text":"a","finish_reason":null}]}'
    usage = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}'
    server.answers = [
        events(text, text, usage),
        answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'),
        answer(b"no", "429 Too Many Requests"),
    ]
    requests = [Request(at_s=at / 50, path="/v1/completions", body=b"{}", is_stream=at == 0) for at in range(3)]
    replay = Replay(server.url, {}, 60, Progress())
    cell = await replay.run(requests, "replay x1")
    outcome = replay.outcome
    assert (cell.num_requests, cell.errors, cell.load) == (2, 1, "replay x1")
    assert (outcome.prompt_tokens, outcome.output_tokens, len(outcome.times)) == (12, 6, 1)
    assert server.num_connections == 3 and "429" in outcome.errors[0]
    rows = comparison(Recording(arrivals=ARRIVALS, prompt_tokens=10, cached_tokens=5, output_tokens=2), outcome, 0.25)
    assert rows[0] == ("requests", "3", "2, 1 failed")
    assert rows[2] == ("of these in the prefix cache", "50.0%", "25.0%")


def test_counts_in_the_words_of_every_route() -> None:
    answers: list[Any] = [
        {"usage": {"prompt_tokens": 5, "completion_tokens": 2}},
        {"response": {"usage": {"input_tokens": 5, "output_tokens": 2}}},
        {"message": {"usage": {"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 2}}},
        [{"details": {"generated_tokens": 2, "prefill": [1] * 5}}],
        {"token": {}, "details": {"generated_tokens": 2, "input_length": 5}},
    ]
    for said in answers:
        counts = Counts()
        counts.read(said)
        assert (counts.prompt, counts.output) == (5, 2), said


async def test_the_prefix_cache_is_asked_before_and_after(server: ScriptedServer, answer: Callable[..., bytes]) -> None:
    ours = b"# TYPE tgi_prefix_cache_hit_tokens counter\n"
    ours += b"tgi_prefix_cache_query_tokens 100\ntgi_prefix_cache_hit_tokens 20\n"
    theirs = b'vllm:prefix_cache_queries_total{engine="0"} 5.0\nvllm:prefix_cache_hits_total{engine="0"} 1.0\n'
    server.answers = [answer(ours), answer(theirs), answer(b"", "404 Not Found")]
    connection = Connection(server.url, {})
    found = [await cache_counters(connection) for _ in range(3)]
    connection.close()
    assert found == [(100, 20), (5, 1), None]
    assert hit_rate((100, 20), (200, 70)) == 0.5 and hit_rate(None, (1, 1)) is None and hit_rate((1, 0), (1, 0)) is None


async def test_ids_of_words_without_marks(server: ScriptedServer, answer: Callable[..., bytes]) -> None:
    server.answers = [answer(b'[{"id":1,"start":0,"stop":0},{"id":9,"start":0,"stop":4},{"id":9,"start":4,"stop":8}]')]
    connection = Connection(server.url, {})
    assert await vocabulary_of(connection, None) == [9]
    connection.close()
