"""S13: the demo model, the only real weights that travel, with default options: its text, and many clients at once."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects.serving import free_port
from benchmarks.server import Server

START, CONTINUED = "Once upon a time", " there was a curious dog named"
ANSWERS, CLIENTS, MOST_TOKENS = 200, 64, 40
TINY_ANSWERS, TINY_CLIENTS, TINY_TOKENS = 6, 3, 6
BEGINNINGS = (
    "Once upon a time",
    "The weather is",
    "one, two, three,",
    "Hello! My name is",
    "In the morning",
    "A list:",
)
ENDINGS = ("", " there", " Lily", " the dog", " and then", " a robot")
LIMIT_S = 60.0


def run(context: Context) -> None:
    """Greedy answers must be the same alone and beside others."""
    environ = {} if context.on_cuda else {"CUDA_VISIBLE_DEVICES": ""}
    # Unset as a user has it: a GPU's own type.
    server = Server(free_port(), "bfloat16" if context.on_cuda else "float32", model="demo", **environ)
    try:
        context.figure("demo: start to an open port", server.start_s, "s", target="start")
        found = _generate(server.url, START, 8)
        context.check("demo: its text", found.startswith(CONTINUED), found)
        _compare(context, server.url)
    finally:
        status = server.stop()
        context.check("demo: ends in order", status == 0, f"status {status}")


def _compare(context: Context, url: str) -> None:
    count, clients, tokens = (
        (TINY_ANSWERS, TINY_CLIENTS, TINY_TOKENS) if context.tiny else (ANSWERS, CLIENTS, MOST_TOKENS)
    )
    source = random.Random(context.seed)
    asked = [
        (source.choice(BEGINNINGS) + source.choice(ENDINGS), source.randint(2, tokens), source.random() < 0.3)
        for _ in range(count)
    ]
    alone = [_generate(url, text, length, streams=streams) for text, length, streams in asked]
    with ThreadPoolExecutor(clients) as pool:
        together = list(pool.map(lambda one: _generate(url, one[0], one[1], streams=one[2]), asked))
    other = [(one[:2], a, b) for one, a, b in zip(asked, alone, together, strict=True) if a != b]
    name = f"demo: {count} greedy answers by {clients} clients equal those alone"
    context.check(name, not other, f"{len(other)} differ: {other[:2]}" if other else "")


def _generate(url: str, text: str, tokens: int, *, streams: bool = False) -> str:
    """A greedy answer, by the plain client of Python's library."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LIMIT_S)
    body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": tokens}})
    route = "/generate_stream" if streams else "/generate"
    try:
        connection.request("POST", route, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        said = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{route} answered {answer.status}: {said[:300]}")
    if streams:
        said = [line[5:] for line in said.splitlines() if line.startswith("data:")][-1]
    return str(json.loads(said)["generated_text"])
