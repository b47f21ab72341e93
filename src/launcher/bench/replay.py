"""Sends the requests of a log again, each when it came."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from launcher.bench.apis import explained
from launcher.bench.load import Progress
from launcher.bench.made_up_prompts import MadeUpPrompts
from launcher.bench.replay_log import Arrival, Recording
from launcher.bench.results import Cell, RequestTimes, percentile, summarise
from launcher.http_stream import BadAnswerError, Connection, event_object

_COMPLETIONS = "/v1/completions"
_WITH_USAGE = ("/v1/completions", "/v1/chat/completions")
_COUNTERS = re.compile(
    rb"^(?:tgi_prefix_cache_(quer|hit)[^ {]*|vllm:prefix_cache_(quer|hit)[^ {]*_total)(?:\{[^}]*\})? ([0-9.e+]+)$", re.M
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent, `at_s` after the start."""

    at_s: float
    path: str
    body: bytes
    is_stream: bool


def requests_of(
    recording: Recording, speed: float, model: str | None, made_up: MadeUpPrompts | None, fixed: Mapping[str, Any]
) -> list[Request]:
    """Return what is sent.

    Args:
        model: Sent instead of the recorded one.
        fixed: Other fields of requests whose prompts are made up.
    """
    return [_request(arrival, speed, model, made_up, fixed) for arrival in recording.arrivals]


def _request(
    arrival: Arrival, speed: float, model: str | None, made_up: MadeUpPrompts | None, fixed: Mapping[str, Any]
) -> Request:
    at_s = arrival.at_s / speed
    if arrival.hashed is not None:
        assert made_up is not None
        asked = {"prompt": made_up.ids(arrival.hashed), "max_tokens": max(arrival.hashed.output_tokens, 1)}
        return Request(at_s=at_s, path=_COMPLETIONS, body=orjson.dumps({**fixed, **asked}), is_stream=True)
    body = orjson.loads(arrival.body)
    is_stream = body.get("stream") is True or arrival.path == "/generate_stream"
    changed: dict[str, Any] = {} if model is None or "model" not in body else {"model": model}
    if is_stream and arrival.path in _WITH_USAGE:
        changed["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    raw = orjson.dumps({**body, **changed}) if changed else arrival.body
    return Request(at_s=at_s, path=arrival.path, body=raw, is_stream=is_stream)


@dataclass
class Outcome:
    """What became of the requests."""

    times: list[RequestTimes] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # the client's own delays
    errors: list[str] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    elapsed_s: float = 0.0


class Replay:
    """One run."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, progress: Progress) -> None:
        self._url, self._headers, self._timeout_s = url, headers, timeout_s
        self._progress = progress
        self.outcome = Outcome()

    async def run(self, requests: Sequence[Request], name: str) -> Cell:
        """Send all, answered or not, and wait for their answers."""
        progress, outcome = self._progress, self.outcome
        progress.load, progress.total, progress.started = name, len(requests), time.perf_counter()
        started = progress.started
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due = started + request.at_s
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._send(request, due))
        outcome.elapsed_s = time.perf_counter() - started
        cell = summarise(name, outcome.times, outcome.errors, outcome.elapsed_s, 0)
        cell.output_tokens_per_s = outcome.output_tokens / outcome.elapsed_s
        cell.num_requests = len(outcome.whole_s)
        cell.requests_per_s = len(outcome.whole_s) / outcome.elapsed_s
        cell.prompt_tokens = outcome.prompt_tokens / max(len(outcome.whole_s), 1)
        return cell

    async def _send(self, request: Request, due: float) -> None:
        self._progress.running += 1
        outcome = self.outcome
        connection = Connection(self._url, self._headers)
        outcome.late_s.append(time.perf_counter() - due)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._answer(connection, request, due)
            outcome.whole_s.append(time.perf_counter() - due)
            self._progress.answered += 1
        except (BadAnswerError, OSError) as error:  # TimeoutError is an OSError
            self._progress.errors += 1
            outcome.errors.append(explained(error))
        finally:
            connection.close()
            self._progress.running -= 1

    async def _answer(self, connection: Connection, request: Request, due: float) -> None:
        counts = Counts()
        if not request.is_stream:
            counts.read(orjson.loads(b"".join([part async for part in connection.post(request.path, request.body)])))
        else:
            arrivals = await self._stream(connection.events(request.path, request.body), counts)
            if arrivals:
                self.outcome.times.append(
                    RequestTimes(
                        first_token_s=arrivals[0] - due,
                        last_token_s=arrivals[-1] - due,
                        gaps_s=[b - a for a, b in itertools.pairwise(arrivals)],
                        output_tokens=counts.output or len(arrivals),
                        prompt_tokens=counts.prompt or None,
                    )
                )
            counts.output = counts.output or len(arrivals)
        self.outcome.output_tokens += counts.output
        self.outcome.prompt_tokens += counts.prompt

    async def _stream(self, events: AsyncGenerator[list[bytes], None], counts: Counts) -> list[float]:
        """Return when each event with text came."""
        arrivals = []
        async with aclosing(events) as answer:
            async for together in answer:
                now = time.perf_counter()
                for data in together:
                    event = event_object(data)
                    if event.get("error"):
                        raise BadAnswerError(f"an error inside the stream: {event['error']}")
                    counts.read(event)
                    if _has_text(event):
                        arrivals.append(now)
                        self._progress.tokens += 1
        return arrivals


@dataclass
class Counts:
    """Tokens of an answer as it says them, in the words of any of the routes."""

    prompt: int = 0
    output: int = 0

    def read(self, answer: Any) -> None:
        """Take note of an answer, or of an event of one."""
        if isinstance(answer, list):
            answer = answer[0] if answer else {}
        if not isinstance(answer, dict):
            return
        for holder in (answer, answer.get("response"), answer.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                cached = usage.get("cache_read_input_tokens") or 0  # Anthropic's `input_tokens` are without them
                self.prompt = usage.get("prompt_tokens") or (usage.get("input_tokens") or 0) + cached or self.prompt
                self.output = usage.get("completion_tokens") or usage.get("output_tokens") or self.output
        if isinstance(details := answer.get("details"), dict):
            self.prompt = details.get("input_length") or len(details.get("prefill") or ()) or self.prompt
            self.output = details.get("generated_tokens") or self.output


def _has_text(event: Mapping[str, Any]) -> bool:
    if "token" in event or isinstance(event.get("delta"), str):
        return True
    if event.get("type") == "content_block_delta":
        return True
    choices = event.get("choices") or ()
    return any(
        choice.get("text") or any(value for name, value in (choice.get("delta") or {}).items() if name != "role")
        for choice in choices
    )


async def cache_counters(connection: Connection) -> tuple[float, float] | None:
    """Return tokens that the prefix cache was asked for and had, since the server's start; None: it does not say."""
    try:
        text = await connection.get("/metrics")
    except (BadAnswerError, OSError):
        return None
    sums = {b"quer": 0.0, b"hit": 0.0}
    found = _COUNTERS.findall(text)
    for ours, theirs, value in found:
        sums[ours or theirs] += float(value)
    return (sums[b"quer"], sums[b"hit"]) if found else None


def hit_rate(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """Return the prefix cache's share of the prompt tokens between two looks at its counters."""
    if before is None or after is None or after[0] == before[0]:
        return None
    return (after[1] - before[1]) / (after[0] - before[0])


def comparison(recording: Recording, outcome: Outcome, cached: float | None) -> list[tuple[str, str, str]]:
    """Return rows: a figure, in the log, in the replay."""
    recorded_rate = (
        None if recording.cached_tokens is None else recording.cached_tokens / max(recording.prompt_tokens, 1)
    )
    first = [times.first_token_s for times in outcome.times]
    return [
        ("requests", f"{len(recording.arrivals)}", f"{len(outcome.whole_s)}, {len(outcome.errors)} failed"),
        ("prompt tokens", f"{recording.prompt_tokens:,}", f"{outcome.prompt_tokens:,}"),
        ("of these in the prefix cache", _share(recorded_rate), _share(cached)),
        ("output tokens", f"{recording.output_tokens:,}", f"{outcome.output_tokens:,}"),
        ("to first token, p50 / p99 ms", _times(recording.first_token_s), _times(first)),
        ("to end of answer, p50 / p99 ms", _times(recording.duration_s), _times(outcome.whole_s)),
        ("sent late by this client, p99 ms", "–", f"{percentile(outcome.late_s, 0.99) * 1e3:.1f}"),
    ]  # fmt: skip


def _share(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _times(seconds: Iterable[float]) -> str:
    found = list(seconds)
    return " / ".join(f"{percentile(found, at) * 1e3:,.1f}" for at in (0.5, 0.99)) if found else "–"
