"""Random load for a while, then quiet: nothing may be held, lost or left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import psutil
from hostile.several.clients import Asked, Kills, asked, send
from hostile.several.served import CONCURRENT, EMBEDDING, GENERATING, NARROW, Served, secret
from support.metrics_text import metrics_of

_NUM_CLIENTS = 20
_LONGEST_WAIT_S = 6.0
"""Of a client that was told to come back later."""
_BATCH_LINES = 12
_ENDED = ("completed", "failed", "expired", "cancelled")
_HELD = ("tgi_batch_current_size", "tgi_queue_size", "tgi_kv_blocks_live", "tgi_key_queue_size",
         "tgi_model_requests_waiting", "tgi_batch_api_requests_waiting")  # fmt: skip
_QUIET_S = 90.0
_BATCH_S = 900.0
"""A batch has ended by then, and a request of one is answered, whatever was killed meanwhile."""
_SPARE_THREADS, _SPARE_DESCRIPTORS = 8, 8


class RandomLoad:
    """The load, on one server. Every random choice follows from the seed; the server's timing does not."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served, self._source, self._kills = served, random.Random(seed), Kills()
        launcher = psutil.Process(served.server.process.pid)
        front = next(p for p in launcher.children() if "router.front" in p.cmdline())
        self._lasting = {"launcher": launcher, "front": front}
        self._before: dict[str, tuple[int, int]] = {}

    def memory(self) -> dict[str, int]:
        """Return the bytes of the processes that last."""
        return {name: int(process.memory_info().rss) for name, process in self._lasting.items()}

    async def __call__(self, seconds: float) -> Counter[str]:
        """Raises AssertionError at the first thing that is not as it should be."""
        seen: Counter[str] = Counter()
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        async with httpx.AsyncClient(base_url=self._served.server.url, timeout=300, limits=limits) as client:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_NUM_CLIENTS):
                    tasks.create_task(self._client(client, random.Random(self._source.random()), until, seen))
                tasks.create_task(self._operator(client, random.Random(self._source.random()), until, seen))
                tasks.create_task(self._batches(client, random.Random(self._source.random()), until, seen))
                tasks.create_task(self._killer(random.Random(self._source.random()), until, seen))
            await self._check_quiet(client)
        return seen

    # What is done to it

    async def _client(self, client: httpx.AsyncClient, source: random.Random, until: float, seen: Counter[str]) -> None:
        while time.monotonic() < until:
            wait_s = await send(client, asked(source), self._kills, seen)
            await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S) if wait_s else source.random() * 0.3)

    async def _operator(
        self, client: httpx.AsyncClient, source: random.Random, until: float, seen: Counter[str]
    ) -> None:
        """Load and unload models, and take a key away and give it back."""
        while time.monotonic() < until:
            await asyncio.sleep(source.uniform(3, 9))
            kind = source.randrange(3)
            if kind == 2:
                self._served.write_keys(*source.choice([(), ("passing",)]))
                seen["keys changed"] += 1
                continue
            path = ("/v1/models/load", "/v1/models/unload")[kind]
            model = source.choice([*GENERATING, EMBEDDING])
            body = {"model": model}
            await send(client, Asked("admin", model, path, body, frozenset({200})), self._kills, seen)
            seen[path.rpartition("/")[2]] += 1
        self._served.write_keys()

    async def _killer(self, source: random.Random, until: float, seen: Counter[str]) -> None:
        while time.monotonic() < until - 5:
            await asyncio.sleep(source.uniform(20, 45))
            models = enumerate((*GENERATING, EMBEDDING))
            victims = [(process, model) for index, model in models for process in self._served.processes(index)]
            if not victims:
                continue
            process, model = source.choice(victims)
            self._kills.at.append((time.monotonic(), model))
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                seen["killed"] += 1

    async def _batches(
        self, client: httpx.AsyncClient, source: random.Random, until: float, seen: Counter[str]
    ) -> None:
        """Batches one after the other, each of whose lines has one answer in the end."""
        while time.monotonic() < until:
            model = source.choice(GENERATING)
            batch = await self._begin_batch(client, model, source)
            await self._check_batch(client, model, await self._ended_batch(client, model, batch))
            seen["batches"] += 1

    async def _begin_batch(self, client: httpx.AsyncClient, model: str, source: random.Random) -> str:
        rows = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions",
             "body": {"prompt": f"The {number}", "max_tokens": source.randint(1, 40), "ignore_eos": True}}
            for number in range(_BATCH_LINES)
        ]  # fmt: skip
        file = ("in.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        upload = {"files": {"file": file}, "data": {"purpose": "batch"}}
        file_id = (await self._insist(client, "POST", f"/models/{model}/v1/files", **upload))["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        made: str = (await self._insist(client, "POST", f"/models/{model}/v1/batches", json=body))["id"]
        return made

    async def _ended_batch(self, client: httpx.AsyncClient, model: str, batch: str) -> Any:
        deadline = time.monotonic() + _BATCH_S
        while True:
            assert time.monotonic() < deadline, f"a batch of {model} does not end: {batch}"
            told = await self._insist(client, "GET", f"/models/{model}/v1/batches/{batch}")
            if told["status"] in _ENDED:
                return told
            await asyncio.sleep(1)

    async def _check_batch(self, client: httpx.AsyncClient, model: str, batch: Any) -> None:
        assert batch["status"] == "completed" and batch["error_file_id"] is None, batch
        text = await self._insist(client, "GET", f"/models/{model}/v1/files/{batch['output_file_id']}/content")
        rows = [json.loads(line) for line in text.splitlines()]
        assert sorted(int(row["custom_id"]) for row in rows) == list(range(_BATCH_LINES)), text
        assert {row["response"]["status_code"] for row in rows} == {200}, text

    async def _insist(self, client: httpx.AsyncClient, method: str, path: str, **parts: Any) -> Any:
        """Return what an answer says, once the model is there to give it."""
        headers = {"authorization": f"Bearer {secret('jobs')}"}
        deadline, status, text = time.monotonic() + _BATCH_S, 0, ""
        while True:
            begin = time.monotonic()
            assert begin < deadline, f"{path}: still {status} {text}"
            try:
                answer = await client.request(method, path, headers=headers, **parts)
            except httpx.RemoteProtocolError:
                status, text = 500, "cut"
            else:
                status, text = answer.status_code, answer.text
                if status == 200:
                    return answer.json() if "json" in answer.headers["content-type"] else text
            assert status in (429, 503) or (status == 500 and self._killed_since(begin - 15)), (
                f"{path}: {status} {text}"
            )
            await asyncio.sleep(1)

    def _killed_since(self, begin: float) -> bool:
        return any(moment >= begin for moment, _ in self._kills.at)

    # What must be true in the end

    async def _check_quiet(self, client: httpx.AsyncClient) -> None:
        for model in (*GENERATING, EMBEDDING):
            await self._until_served(client, model)
        deadline = time.monotonic() + _QUIET_S
        while held := await self._held(client):
            assert time.monotonic() < deadline, f"still held: {held}"
            await asyncio.sleep(0.2)
        for key, number in (("narrow", NARROW), ("admin", CONCURRENT)):
            statuses = await asyncio.gather(*(self._ask(client, "chat", key) for _ in range(number)))
            assert set(statuses) == {200}, f"permits of {key} are lost: {statuses}"
        while grown := self._grown():
            assert time.monotonic() < deadline, f"grown: {grown}"
            await asyncio.sleep(0.2)
        self._check_log()

    async def _until_served(self, client: httpx.AsyncClient, model: str) -> None:
        """The last kill may have come just now, behind others."""
        deadline = time.monotonic() + 330
        while await self._ask(client, model, "admin") != 200:
            assert time.monotonic() < deadline, f"{model} does not come back"
            await asyncio.sleep(1)

    async def _ask(self, client: httpx.AsyncClient, model: str, key: str) -> int:
        body: dict[str, Any] = {"model": model, "input": "x"} if model == EMBEDDING else {
            "model": model, "prompt": "x", "max_tokens": 2}  # fmt: skip
        path = "/v1/embeddings" if model == EMBEDDING else "/v1/completions"
        headers = {"authorization": f"Bearer {secret(key)}"}
        return (await client.post(path, json=body, headers=headers)).status_code

    async def _held(self, client: httpx.AsyncClient) -> dict[str, float]:
        headers = {"authorization": f"Bearer {secret('admin')}"}
        values = metrics_of((await client.get("/metrics", headers=headers)).text)
        return {name: value for name, value in values.items() if name.partition("{")[0] in _HELD and value}

    def _grown(self) -> dict[str, tuple[int, int]]:
        """Return descriptors and threads of the lasting processes that have more than behind the first load."""
        now = {name: (process.num_fds(), process.num_threads()) for name, process in self._lasting.items()}
        self._before = self._before or now
        spare = (_SPARE_DESCRIPTORS, _SPARE_THREADS)
        return {
            name: numbers
            for name, numbers in now.items()
            if any(
                number > before + more for number, before, more in zip(numbers, self._before[name], spare, strict=True)
            )
        }

    def _check_log(self) -> None:
        log = self._served.server.log()
        for word in ("tk-marker-", "Traceback (most recent call last)"):
            position = log.find(word)
            assert position < 0, f"{word!r} is in the log: {log[max(0, position - 500) : position + 1500]}"
