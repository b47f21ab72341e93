"""Reads what is replayed: a request log of ours, or Mooncake's trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

_BLOCK, _MOONCAKE_BLOCK = 64, 512
# Others change the server, or ask it for nothing that takes time.
_REPLAYED = frozenset({
    "/", "/generate", "/generate_stream", "/vertex", "/invocations", "/v1/chat/completions", "/v1/completions",
    "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/infill", "/embed", "/embed_sparse", "/embed_all",
    "/rerank", "/predict", "/similarity",
})  # fmt: skip
_OK, _OVERLOADED = 200, 429


@dataclass(frozen=True, kw_only=True)
class Hashed:
    """A prompt known by numbers of its blocks, each of which stands for the prompt up to the block's end."""

    hash_ids: Sequence[int]
    num_tokens: int
    block: int  # tokens
    cached_tokens: int = 0
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request. at_s: after the first of the log."""

    at_s: float
    path: str = ""
    body: bytes = b""
    hashed: Hashed | None = None  # instead of a body


@dataclass(kw_only=True)
class Recording:
    """All arrivals of a log in order, and what the log says of their answers, 0 or empty where it does not."""

    arrivals: list[Arrival] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # lines, by why
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    duration_s: list[float] = field(default_factory=list)


def read_log(path: Path, most: int | None = None) -> Recording:
    """Read a log, or its first `most` requests. Raises ValueError with a sentence."""
    rows: list[tuple[float, dict[str, Any]]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_row(path, number, line))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    rows.sort(key=lambda row: row[0])
    found = Recording()
    first = rows[0][0] if rows else 0.0
    for at_s, row in rows:
        if most is not None and len(found.arrivals) >= most:
            break
        try:
            _add(found, at_s - first, row)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"{path}: the line of {row.get('time', row.get('timestamp'))} has no form of ours"
            ) from None
    if not found.arrivals:
        reasons = "; ".join(f"{count} {why}" for why, count in found.left_out.items()) or "no lines"
        raise ValueError(f"{path} has no request to replay: {reasons}")
    return found


def _row(path: Path, number: int, line: bytes) -> tuple[float, dict[str, Any]]:
    try:
        row = orjson.loads(line)
        at_s = row["timestamp"] / 1000 if "timestamp" in row else datetime.fromisoformat(row["time"]).timestamp()
    except (ValueError, LookupError, TypeError):
        text = "is neither a line of a request log nor of Mooncake's trace"
        raise ValueError(f"{path}, line {number}: {text}") from None
    return at_s, row


def _add(found: Recording, at_s: float, row: Mapping[str, Any]) -> None:
    if "timestamp" in row:
        found.prompt_tokens += row["input_length"]
        found.output_tokens += row["output_length"]
        hashed = Hashed(
            hash_ids=row["hash_ids"], num_tokens=row["input_length"], block=_MOONCAKE_BLOCK,
            output_tokens=row["output_length"],
        )  # fmt: skip
        found.arrivals.append(Arrival(at_s=at_s, hashed=hashed))
        return
    if row["status"] not in (_OK, _OVERLOADED):
        found.left_out["refused or failed"] += 1
        return
    arrivals = _recorded(at_s, row) if "body" in row else _traced(at_s, row)
    if isinstance(arrivals, str):
        found.left_out[arrivals] += 1
        return
    found.arrivals += arrivals
    if row["status"] == _OK:
        found.prompt_tokens += row["tokens_in"]
        found.cached_tokens = (found.cached_tokens or 0) + row["tokens_cached"]
        found.output_tokens += row["tokens_out"]
        found.duration_s.append(row["duration_s"])
        # Of an answer in one piece a client does not see it.
        is_seen = row["first_token_s"] is not None and (row["stream"] or "body" not in row)
        found.first_token_s += [row["first_token_s"]] if is_seen else []


def _recorded(at_s: float, row: Mapping[str, Any]) -> list[Arrival] | str:
    """Return the request as it was sent, or why not."""
    if row["path"] not in _REPLAYED:
        return "of other routes"
    try:
        is_object = isinstance(orjson.loads(row["body"]), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return [Arrival(at_s=at_s, path=row["path"], body=row["body"].encode())] if is_object else "without a JSON object"


def _traced(at_s: float, row: Mapping[str, Any]) -> list[Arrival] | str:
    """Return a request for each generation, or why there is none."""
    if "prompts" not in row:
        return "without prompts (`--request-log-level trace` or `full` records them)"
    if not row["prompts"]:
        return "without a prompt that was answered"
    num_choices = max(len(row["finish_reasons"]) // len(row["prompts"]), 1)
    each = max(round(row["tokens_out"] / (num_choices * len(row["prompts"]))), 1)
    return [
        Arrival(
            at_s=at_s,
            hashed=Hashed(
                hash_ids=prompt["hash_ids"], num_tokens=prompt["tokens"], block=_BLOCK,
                cached_tokens=prompt["cached"], output_tokens=each,
            ),
        )
        for prompt in row["prompts"]
        for _ in range(num_choices)
    ]  # fmt: skip
