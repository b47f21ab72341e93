"""A closed-loop streaming client: `concurrency` workers, each sends its next request when its last one has ended.

Speaks HTTP/1.1 on bare asyncio streams: a general client would cost more than the server it measures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class StreamTimes:
    """One answered request: seconds to the first token, gaps between tokens, tokens."""

    first_token_s: float
    gaps_s: list[float]
    num_tokens: int


@dataclass
class Cell:
    """One measured cell. Latencies in seconds."""

    concurrency: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    errors: int = 0
    repeats: list[float] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


async def stream_once(url: str, body: dict[str, Any]) -> StreamTimes:
    """POST to /generate_stream and time every event.

    Raises RuntimeError for any answer but a whole stream.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    payload = json.dumps(body).encode()
    head = f"POST /generate_stream HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    started = time.perf_counter()
    writer.write(f"{head}connection: close\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace"))
        arrivals = [time.perf_counter() async for line in reader if line.startswith(b"data:")]
    finally:
        writer.close()
    if not arrivals:
        raise RuntimeError("the stream ended without a token")
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return StreamTimes(arrivals[0] - started, gaps, len(arrivals))


async def closed_loop(url: str, bodies: list[dict[str, Any]], concurrency: int) -> Cell:
    """Answer all `bodies` with `concurrency` workers and sum up."""
    waiting = list(reversed(bodies))
    times: list[StreamTimes] = []
    errors = 0

    async def work() -> None:
        nonlocal errors
        while waiting:
            try:
                times.append(await stream_once(url, waiting.pop()))
            except (RuntimeError, OSError):
                errors += 1

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    elapsed = time.perf_counter() - started
    first = [t.first_token_s for t in times]
    gaps = [g for t in times for g in t.gaps_s]
    return Cell(
        concurrency=concurrency,
        output_tokens_per_s=sum(t.num_tokens for t in times) / elapsed,
        requests_per_s=len(times) / elapsed,
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        itl_p50=percentile(gaps, 0.5),
        itl_p99=percentile(gaps, 0.99),
        errors=errors,
    )


def median_cell(cells: list[Cell]) -> Cell:
    """The repeat with the median throughput, with the throughput of all repeats beside it."""
    rates = [c.output_tokens_per_s for c in cells]
    middle = min(cells, key=lambda c: abs(c.output_tokens_per_s - statistics.median(rates)))
    middle.repeats = rates
    return middle
