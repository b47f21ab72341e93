"""What pictures of twelve megapixels cost those who send none: `PYTHONPATH=tests python -m benchmarks.images`.

The time between the tokens of running streams, without pictures and beside clients that send one after the other as
data URLs, in turns, on a tiny model with random weights; and, in this process, for how long the router's event loop
does not run while it takes in such a picture.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from support.vision_models import write_vision_checkpoint

from benchmarks.server import Server
from benchmarks.stopping import exit_on_signals
from router.api.chat.prompt import images_of
from router.api.chat.schema import ChatBody
from router.api.http.body import parse_json
from router.images.reader import ImageLimits, ImageReader, NoFetcher
from router.images.store import ImageStore
from router.images.workers import ImageWorkers
from router.metrics import Metrics
from router.server.serving import SWITCH_INTERVAL_S

OUT = Path(__file__).parent / "out" / "images.json"
_TICK_S = 0.0005
_NUM_STREAMS, _NUM_SENDERS, _NUM_PICTURES = 4, 2, 8


def body_of(seed: int, megapixels: float) -> bytes:
    """A chat with a JPEG of some megabytes, as a camera writes it."""
    width, height = round((megapixels * 4e6 / 3) ** 0.5), round((megapixels * 3e6 / 4) ** 0.5)
    coarse = np.random.default_rng(seed).integers(0, 255, (height // 8, width // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


async def gaps_of(url: str, is_over: Callable[[], bool]) -> list[float]:
    """Seconds between the tokens of some streams, until it is over."""
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}
    gaps: list[float] = []

    async def stream(client: httpx.AsyncClient) -> None:
        while not is_over():
            async with client.stream("POST", "/generate_stream", json=body) as answer:
                last = None
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append(now - last)
                        last = now
                    if is_over():
                        break

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(stream(client) for _ in range(_NUM_STREAMS)))
    return gaps


class Senders:
    """Clients in threads of their own that send pictures until they are stopped."""

    def __init__(self, url: str, bodies: list[bytes]) -> None:
        self._url = url
        self._bodies = bodies
        self._is_over = threading.Event()
        self.num_sent = 0
        self._threads = [threading.Thread(target=self._send, args=(first,)) for first in range(_NUM_SENDERS)]

    def __enter__(self) -> Senders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=600) as client:
            while not self._is_over.is_set():
                body = self._bodies[number % len(self._bodies)]
                answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 200, answer.text
                number += _NUM_SENDERS
                self.num_sent += 1


def measure_streams(url: str, bodies: list[bytes], turns: int, turn_s: float) -> dict[str, Any]:
    """Quiet and beside pictures, in turns."""
    found: dict[str, list[float]] = {"quiet": [], "beside": []}
    num_sent = 0
    for turn in range(2 * turns):
        until = time.monotonic() + turn_s
        run = partial(asyncio.run, gaps_of(url, lambda until=until: time.monotonic() > until))
        if turn % 2:
            with Senders(url, bodies) as senders:
                found["beside"] += run()
            num_sent += senders.num_sent
        else:
            found["quiet"] += run()
    measured: dict[str, Any] = {name: summary(gaps) for name, gaps in found.items()}
    measured["p99 beside / quiet"] = measured["beside"]["p99_ms"] / measured["quiet"]["p99_ms"]
    return measured | {"pictures_per_s": num_sent / (turns * turn_s)}


async def measure_loop(folder: Path, bodies: list[bytes]) -> dict[str, float]:
    """Milliseconds for which the event loop did not run while it took in a picture: the longest time of each."""
    workers = ImageWorkers(folder, "float32", num_workers=1)
    await workers.start()
    store = ImageStore(cache_bytes=0, memory_bytes=1 << 30)
    limits = ImageLimits(max_images=8, max_bytes=32 << 20, max_pixels=50_000_000)
    reader = ImageReader(workers, store, NoFetcher(), limits, Metrics())
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            longest = max(longest, time.perf_counter() - began - _TICK_S)

    async def longest_during(work: Callable[[], Awaitable[Any]]) -> float:
        nonlocal longest
        longest = 0.0
        await work()
        return 1000 * longest

    async def take_in(body: bytes) -> None:
        chat = await asyncio.to_thread(lambda: ChatBody.model_validate(parse_json(body)))
        await reader.read(images_of(chat))

    ticking = asyncio.create_task(tick())
    try:
        with_picture = [await longest_during(partial(take_in, body)) for body in bodies]
        without = [await longest_during(partial(asyncio.sleep, 0.5)) for _ in bodies]
    finally:
        ticking.cancel()
        await asyncio.to_thread(workers.close)
    return {
        "picture_ms": statistics.median(with_picture),
        "nothing_ms": statistics.median(without),
    }


def summary(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    places = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {name: 1000 * ordered[int(len(ordered) * place)] for name, place in places.items()} | {
        "max_ms": 1000 * ordered[-1], "tokens": len(ordered),
    }  # fmt: skip


def main() -> None:
    exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8097)
    parser.add_argument("--megapixels", type=float, default=12)
    parser.add_argument("--turns", type=int, default=4, help="of each, quiet and beside pictures")
    parser.add_argument("--turn-seconds", type=float, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    bodies = [body_of(seed, options.megapixels) for seed in range(_NUM_PICTURES)]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory(prefix="tercet-images-") as name:
        folder = Path(name)
        write_vision_checkpoint(folder, "llava")
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        results: dict[str, Any] = {"body_mb": len(bodies[0]) / 1e6}
        results["event loop blocked"] = asyncio.run(measure_loop(folder, bodies))
        arguments = ("--max-total-tokens", "1000", "--image-cache-mib", "0")
        server = Server(options.port, "float32", model=str(folder), arguments=arguments)
        try:
            results["streams"] = measure_streams(server.url, bodies, options.turns, options.turn_seconds)
        finally:
            server.stop()
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    Console().print_json(json.dumps(results))


if __name__ == "__main__":
    main()
