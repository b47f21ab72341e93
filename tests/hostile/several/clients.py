"""What one client sends, and the one answer that it must get."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from hostile.answers import check_error
from hostile.random_bodies import MARK
from hostile.several.served import EMBEDDING, GENERATING, START_TIMEOUT_S, secret

_WORDS = ["river", "stone", "light", "seven", "12", "window", "quick", "under", "BLUE", "sing", "[x]", "é", "don't"]
_KEYS = ["admin", "heavy", "heavy", "heavy", "narrow", "slow", "chatting", "jobs", "passing"]
_TURN_S, _RARE = 45.0, 0.002
_NOTICED_S = 15.0
"""A request that comes so soon behind a kill may meet what is left of the processes."""
_RETRY_S, _MOST_RETRY_S = 10.0, 300.0
"""A model that was killed n times in a row is not started for 2^(n - 1) times the first, and the second at most."""
_STEADY_S = 60.0
"""Kills are in a row where the model has served for less than this in between."""


@dataclass
class Kills:
    """When the processes of which model were killed."""

    at: list[tuple[float, str]] = field(default_factory=list)

    def between(self, model: str, begin: float, end: float) -> bool:
        return any(name == model and begin <= moment <= end for moment, name in self.at)

    def explain_failure(self, model: str, begin: float) -> bool:
        """Whether a model may still wait, at `begin`, for its start behind kills in a row."""
        moments = [moment for moment, name in self.at if name == model]
        waits_s = 0.0
        for before, moment in pairwise([-math.inf, *moments]):
            in_a_row = moment - before < _STEADY_S + START_TIMEOUT_S + waits_s
            waits_s = min(max(2 * waits_s, _RETRY_S), _MOST_RETRY_S) if in_a_row else _RETRY_S
        return bool(moments) and begin < moments[-1] + waits_s + _NOTICED_S


@dataclass(frozen=True)
class Asked:
    """A request, and how its answer ends."""

    key: str
    model: str
    path: str
    body: dict[str, Any]
    statuses: frozenset[int]
    """Besides what limits and starts give."""
    events_read: int | None = None
    """Of a stream whose client leaves."""


def asked(source: random.Random) -> Asked:
    """Return any request, most of them sound; for a while most of them are for the same two models."""
    key = source.choice(_KEYS)
    turn, models = int(time.monotonic() / _TURN_S), [*GENERATING, EMBEDDING]
    model = models[turn % 3 if source.random() < _RARE else (turn + source.randint(1, 2)) % 3]
    statuses = frozenset({401} if key == "passing" else ()) | {403 if key == "chatting" and model != "chat" else 200}
    kind = source.random()
    if kind < 0.06:
        return _wrong(source)
    if model == EMBEDDING:
        body: dict[str, Any] = {"model": model, "input": [_text(source) for _ in range(source.randint(1, 4))]}
        return Asked(key, model, "/v1/embeddings", body, statuses)
    path, body = source.choice([_chat, _completion, _native, _message])(source, model)
    leaves = source.randint(0, 3) if body.get("stream") and source.random() < 0.2 else None
    return Asked(key, model, path, body, statuses, leaves)


def _wrong(source: random.Random) -> Asked:
    """A request that is refused, whatever else happens."""
    message = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2}
    return source.choice([
        Asked("expired", "chat", "/v1/chat/completions", message | {"model": "chat"}, frozenset({401})),
        Asked("nobody", "chat", "/v1/chat/completions", message | {"model": "chat"}, frozenset({401})),
        Asked("heavy", "", "/v1/chat/completions", message | {"model": "nope"}, frozenset({404})),
        Asked("heavy", "", "/v1/chat/completions", message, frozenset({400})),
        Asked("heavy", "", "/v1/models/unload", {"model": "chat"}, frozenset({403})),
        Asked("heavy", "chat", "/v1/chat/completions", {"model": "chat", "messages": 7}, frozenset({400})),
        Asked("heavy", "chat", "/models/chat/generate", {"inputs": ""}, frozenset({422})),
        Asked("heavy", "chat", "/v1/embeddings", {"model": "chat", "input": MARK}, frozenset({400, 404, 424})),
    ])  # fmt: skip


def _text(source: random.Random) -> str:
    return " ".join([MARK, *source.choices(_WORDS, k=source.choice([1, 5, 40]))])


def _extra(source: random.Random, key: str) -> dict[str, Any]:
    extra: dict[str, Any] = {key: source.randint(1, 80), "stream": source.random() < 0.5}
    if source.random() < 0.3:
        extra["priority"] = source.randint(-6, 6)
    if source.random() < 0.1:
        extra["cache_salt"] = source.choice("ab")
    return extra


def _chat(source: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": _text(source)}]
    return "/v1/chat/completions", {"model": model, "messages": messages} | _extra(source, "max_tokens")


def _message(source: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": _text(source)}]
    return "/v1/messages", {"model": model, "messages": messages} | _extra(source, "max_tokens")


def _completion(source: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    prompt = [_text(source) for _ in range(source.randint(1, 2))]
    return "/v1/completions", {"model": model, "prompt": prompt} | _extra(source, "max_tokens")


def _native(source: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    parameters = _extra(source, "max_new_tokens") | {"ignore_eos": True}
    stream = parameters.pop("stream")
    salt = parameters.pop("cache_salt", None)
    if salt is not None:
        parameters["cache_salt"] = salt
    route = "generate_stream" if stream else "generate"
    body = {"inputs": _text(source), "parameters": parameters}
    return f"/models/{model}/{route}", body | ({"stream": True} if stream else {})


async def send(client: httpx.AsyncClient, request: Asked, kills: Kills, seen: Counter[str]) -> float:
    """Send a request and read its answer; return the seconds that a refusal asks to wait. Raises AssertionError."""
    begin = time.monotonic()
    headers = {"authorization": f"Bearer {secret(request.key)}"}
    try:
        async with client.stream("POST", request.path, json=request.body, headers=headers) as answer:
            if answer.status_code == 200 and request.events_read is not None:
                await _leave(answer, request.events_read)
                seen["left"] += 1
                return 0.0
            text = (await answer.aread()).decode()
    except httpx.RemoteProtocolError as error:
        assert kills.between(request.model, begin - _NOTICED_S, time.monotonic()), f"{request}: {error!r}"
        seen["cut"] += 1
        return 0.0
    end = time.monotonic()
    was_killed = kills.between(request.model, begin - _NOTICED_S, end)
    seen[str(answer.status_code)] += 1
    if answer.status_code == 200:
        _check_whole(request, answer, text, was_killed, seen)
        return 0.0
    check_error(text, request.path)
    if answer.status_code in request.statuses:
        return 0.0
    said = f"{answer.status_code} after {end - begin:.1f} s to {request}: {text[:500]}"
    if answer.status_code == 429:
        seen[f"429 of {request.key}"] += 1
    elif answer.status_code == 503:
        _check_unavailable(request, text, kills, begin, end, said)
    else:
        assert was_killed and answer.status_code in (500, 424), said
        return 0.0
    if request.path.startswith("/v1/models/"):
        return 0.0  # an operator may load a model again at once
    assert "retry-after" in answer.headers, said
    return float(answer.headers["retry-after"])


async def _leave(answer: httpx.Response, events: int) -> None:
    async for line in answer.aiter_lines():
        events -= line.startswith("data:")
        if events < 0:
            return


def _check_unavailable(request: Asked, text: str, kills: Kills, begin: float, end: float, said: str) -> None:
    """A model that does not serve has waited for its turn as long as it may, or was killed."""
    if "is being loaded" in text and end - begin >= START_TIMEOUT_S - 1:
        return
    if "has failed" in text and kills.explain_failure(request.model, begin):
        return
    assert kills.between(request.model, begin - _NOTICED_S - START_TIMEOUT_S, end), said


def _check_whole(request: Asked, answer: httpx.Response, text: str, was_killed: bool, seen: Counter[str]) -> None:
    assert 200 in request.statuses, f"served: {request}"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        json.loads(text)
        return
    events = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    values = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [index for index, value in enumerate(values) if "error" in value or value.get("type") == "error"]
    said = f"{request}: {text[-800:]}"
    if errors:
        assert was_killed and errors == [len(values) - 1], said
        seen["ended by an error"] += 1
        return
    assert _num_ends(request.path, values, events) == 1, said


def _num_ends(path: str, values: list[Any], events: list[str]) -> int:
    """Return how often a stream has ended, in the form of its API; 1 only if nothing comes behind it."""
    if path == "/v1/messages":
        return [value["type"] for value in values].count("message_stop") if values[-1]["type"] == "message_stop" else 0
    if not path.startswith("/v1/"):
        ends = [value["generated_text"] is not None for value in values]
        return sum(ends) if ends[-1] else 0
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    reasons = Counter(c["index"] for value in values for c in value["choices"] if c["finish_reason"] is not None)
    choices = {choice["index"] for value in values for choice in value["choices"]}
    return 1 if set(reasons) == choices and set(reasons.values()) == {1} else 0
