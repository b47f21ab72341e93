"""A thin /v1/completions around OpenVINO GenAI's continuous batching; runs in that peer's own environment.

OpenVINO Model Server is not to be had as a Python package. One thread does everything: `step` holds the interpreter, so
a second one would only wait for it. Usage: openvino_server.py MODEL PRECISION PORT
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import openvino
import openvino_genai
from tokenizers import Tokenizer


class Engine:
    def __init__(self, model: str, precision: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        hint = {"bfloat16": "bf16", "float32": "f32"}[precision]
        # The default on a CPU keeps keys and values in eight bits, which is not the same work.
        properties = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self._numbers = itertools.count()
        self._running: dict[int, tuple[Any, asyncio.Queue[list[int] | None]]] = {}
        self._wake = asyncio.Event()

    def add(self, prompt: str, max_tokens: int) -> tuple[int, asyncio.Queue[list[int] | None]]:
        """Number of prompt tokens, and the queue of new ids; None ends it."""
        ids = self._tokenizer.encode(prompt).ids
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        number = next(self._numbers)
        handle = self._pipeline.add_request(number, openvino.Tensor([ids]), config)
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._running[number] = (handle, queue)
        self._wake.set()
        return len(ids), queue

    def text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._pipeline.step()
            for number, (handle, queue) in list(self._running.items()):
                if handle.can_read():
                    for output in handle.read().values():
                        queue.put_nowait(list(output.generated_ids))
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    queue.put_nowait(None)
                    del self._running[number]
            if not self._running:
                self._wake.clear()
            await asyncio.sleep(0)


async def answer(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.lower().split("\r\n")
            length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            if head.startswith("POST /v1/completions "):
                await stream(engine, body, writer)
            elif head.startswith(("GET /health ", "GET /v1/models ")):
                data = json.dumps({"data": [{"id": "model"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def stream(engine: Engine, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")

    def send(data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))

    num_prompt, queue = engine.add(body["prompt"], body["max_tokens"])
    count = 0
    while (ids := await queue.get()) is not None:
        count += len(ids)
        send(json.dumps({"choices": [{"index": 0, "text": engine.text(ids), "finish_reason": None}]}).encode())
    usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
    send(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}).encode())
    send(b"[DONE]")
    writer.write(b"0\r\n\r\n")


async def main() -> None:
    model, precision, port = sys.argv[1:]
    engine = Engine(model, precision)
    server = await asyncio.start_server(lambda r, w: answer(engine, r, w), "127.0.0.1", int(port))
    await asyncio.gather(engine.run(), server.serve_forever())


if __name__ == "__main__":
    asyncio.run(main())
