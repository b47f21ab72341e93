"""The processes of one run, and what is measured on them."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.router.child import Child, cpu_seconds, free_port

SHORT_PROMPT = "Tell me how the launcher starts a router and a shard."
LONG_PROMPT = " ".join(["the launcher starts a router and one model server for every device"] * 8)
_START_LIMIT_S = 60.0
_IDLE_STEP_S = 0.1
_WARM_UP_STEPS = 50
_STORM_S = 2.0
_PORTION = 500
_VALIDATED = "tgi_request_max_new_tokens_count"
LONGEST = 90_000  # tokens of a lone stream; it is hung up on long before
MOST_STEP_TOKENS = 99_000


@dataclass(frozen=True)
class Window:
    """What one window of steady streaming showed."""

    tokens_per_s: float
    cpu_us_per_token: float
    client_cpu_us_per_token: float
    steps_per_s: float
    busy_share: float  # of the device: steps * step time / time
    starved_share: float  # of the time, the router's loop wanted a core and had none: somebody else's load


class Bench:
    """Shard, router and client, running."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int,
        max_batch_size: int,
        max_concurrent: int,
        step_tokens: int | None = None,
        num_ranks: int = 1,
        num_endpoints: int = 0,
        num_stages: int = 1,
    ) -> None:
        """step_tokens: a step that computes prompts computes the next tokens of the running requests too, as on a GPU,
        and as many tokens in all; None: it computes prompts alone. num_ranks: of the shard. num_endpoints: that pass
        calls on to the ranks; 0: each rank has a connection. num_stages: of the pipeline that a step passes through."""
        _raise_file_limit()
        self.port = free_port()
        name = f"{num_blocks}-{num_ranks}-{num_endpoints}-{num_stages}"
        path = f"{folder}/shard-{name}"
        numbers = {"ranks": num_ranks, "endpoints": num_endpoints, "stages": num_stages}
        shard_options = [
            *(["chunks"] if step_tokens is not None else []), *(f"{what}={number}" for what, number in numbers.items())
        ]  # fmt: skip
        self.shard = Child(
            "benchmarks.router.null_shard", path, str(num_blocks), *shard_options, log=folder / "shard.log"
        )
        self.router_log = folder / f"router-{name}.log"
        options = {
            "tokenizer-name": "demo", "master-shard-uds-path": path, "port": self.port, "hostname": "127.0.0.1",
            "max-concurrent-requests": max_concurrent, "max-connections": max_concurrent + 64,
            "max-batch-size": max_batch_size, "max-total-tokens": 100_000, "max-input-tokens": 1000,
            "max-step-seconds": 600,
        }  # fmt: skip
        if step_tokens is not None:
            options |= dict.fromkeys(("max-input-tokens", "max-batch-prefill-tokens"), MOST_STEP_TOKENS)
            options["max-step-prefill-tokens"] = step_tokens
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with self.router_log.open("wb") as log:
            self.router = subprocess.Popen([sys.executable, "-m", "router", *arguments], stdout=log, stderr=log)
        self._wait_for_router()
        self.client = Child("benchmarks.router.client", str(self.port), log=folder / "client.log")

    def stop(self) -> None:
        self.client.stop()
        self.router.send_signal(signal.SIGTERM)
        try:
            self.router.wait(10)
        except subprocess.TimeoutExpired:
            self.router.kill()
            self.router.wait()
        self.shard.stop()

    def _wait_for_router(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and self.router.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.05)
        self.shard.stop()
        raise RuntimeError(f"the router does not listen:\n{self.router_log.read_text(errors='replace')[-2000:]}")

    @property
    def router_cpu_s(self) -> float:
        return cpu_seconds(self.router.pid)

    def router_memory_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.router.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def gauge(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)

    def router_idle(self) -> float:
        """Waits until the router does nothing any more; its CPU time then."""
        while True:
            before = self.router_cpu_s
            time.sleep(_IDLE_STEP_S)
            after = self.router_cpu_s
            if after - before < 0.02 * _IDLE_STEP_S:
                return after

    @contextlib.contextmanager
    def streaming(self, rows: int, max_new_tokens: int, *, step_s: float = 0.0, low_water: int = 1) -> Iterator[None]:
        """`rows` streams that all get tokens; they are hung up on in the end.

        low_water: bytes of a stream that wake the client. On one machine the sender pays for waking the reader, at
        every event; a reader elsewhere costs it nothing of the kind.
        """
        self.client.ask("forget")
        self.shard.ask("pace", step_s=step_s)
        self.client.ask("open", number=rows, low_water=low_water)
        self.client.ask("send", body=body(max_new_tokens), is_stream=True)
        self._until("num_begun", rows)
        time.sleep(0.3)
        try:
            yield
            if self.client.ask("counts")["num_ended"]:
                raise RuntimeError("a stream ended inside a window: raise its max_new_tokens")
        finally:
            self.client.ask("close")
            self.shard.ask("pace", step_s=0.0)
            self.router_idle()

    def window(self, seconds: float, step_s: float = 0.0) -> Window:
        self.shard.ask("reset")
        before, cpu, client_cpu = self.client.ask("counts"), self.router_cpu_s, self.client.cpu_s
        starved = self.starved_s()
        time.sleep(seconds)
        starved = self.starved_s() - starved
        after, cpu, client_cpu = (
            self.client.ask("counts"), self.router_cpu_s - cpu, self.client.cpu_s - client_cpu,
        )  # fmt: skip
        num_steps = self.shard.ask("statistics")["num_steps"]
        elapsed = after["at"] - before["at"]
        tokens = max(after["num_events"] - before["num_events"], 1)
        return Window(
            tokens_per_s=tokens / elapsed,
            cpu_us_per_token=cpu / tokens * 1e6,
            client_cpu_us_per_token=client_cpu / tokens * 1e6,
            steps_per_s=num_steps / elapsed,
            busy_share=num_steps * step_s / elapsed,
            starved_share=starved / elapsed,
        )

    def starved_s(self) -> float:
        """Time that the router's main thread has waited for a core."""
        return int(Path(f"/proc/{self.router.pid}/schedstat").read_text().split()[1]) / 1e9

    def latency(self, seconds: float, step_s: float = 0.0) -> dict[str, float]:
        """From a step's answer in the shard to its token in the client, with one stream running.

        Both processes read the same clock, and the n-th event is the n-th step's.
        """
        self.client.ask("forget")
        self.shard.ask("pace", step_s=step_s)
        self.client.ask("open", number=1)
        self.client.ask("trace")
        self.shard.ask("reset")
        self.client.ask("send", body=body(LONGEST), is_stream=True)
        time.sleep(seconds)
        arrived = self.client.ask("traced")
        self.client.ask("close")
        answered = self.shard.ask("statistics")["answered_at"]
        self.shard.ask("pace", step_s=0.0)
        self.router_idle()
        delays = [there - here for here, there in zip(answered, arrived, strict=False)][_WARM_UP_STEPS:]
        return {"p50_ms": statistics.median(delays) * 1e3, "p99_ms": quantile(delays, 0.99) * 1e3}

    def _until(self, name: str, number: int, limit_s: float = 120.0) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while True:
            counts: dict[str, Any] = self.client.ask("counts")
            if counts["num_refused"]:
                raise RuntimeError(f"{counts['num_refused']} requests were refused")
            if counts[name] >= number:
                return counts
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} is {counts[name]}, not {number}, after {limit_s:g} s")
            time.sleep(0.02)

    # Requests.

    def queued(self, number: int, prompt: str = SHORT_PROMPT, *, first: int = 0) -> dict[str, float]:
        """CPU of opening connections, and of `number` requests from the first byte to the queue.

        The device is held, so that nothing else is done meanwhile.
        """
        cpu = self.router_idle()
        self.client.ask("open", number=number)
        opened = self.router_idle()
        wanted = self.gauge(_VALIDATED) + number
        before = self.router_idle()
        self.client.ask("send", body=body(1, prompt), is_stream=False, first=first)
        looked_s = 0.0
        while True:
            validated = self.router_idle()
            # On a busy machine a router that waits for a core looks idle.
            if self.gauge(_VALIDATED) >= wanted:
                break
            looked_s += self.router_cpu_s - validated
        return {
            "connection_us": (opened - cpu) / number * 1e6,
            "request_us": (validated - before - looked_s) / number * 1e6,
        }

    def validated(self, number: int, prompt: str) -> dict[str, float]:
        """CPU of requests up to the queue, and from there to the answer of one token."""
        self.client.ask("forget")
        self.shard.ask("hold")
        result = self.queued(number, prompt)
        before = self.router_cpu_s
        started = time.monotonic()
        self.shard.ask("release")
        self._until("num_ended", number)
        result["drain_per_s"] = number / (time.monotonic() - started)
        result["answer_us"] = (self.router_idle() - before) / number * 1e6
        self.client.ask("close")
        self.router_idle()
        return result

    def closed_loop(self, concurrency: int, total: int, max_new_tokens: int, *, is_stream: bool) -> dict[str, float]:
        self.client.ask("forget")
        self.client.ask("open", number=concurrency)
        cpu = self.router_cpu_s
        elapsed = self.client.ask("closed_loop", body=body(max_new_tokens), is_stream=is_stream, total=total)
        cpu = self.router_cpu_s - cpu
        self._until("num_ended", total)
        self.client.ask("close")
        self.router_idle()
        return {"requests_per_s": total / elapsed, "cpu_us_per_request": cpu / total * 1e6}

    @contextlib.contextmanager
    def waiting(self, number: int, rows: int) -> Iterator[dict[str, Any]]:
        """`number` requests in the queue behind the `rows` that run; after the rows are gone all are answered."""
        result: dict[str, Any] = {"router_mib_before": self.router_memory_bytes() / 2**20}
        started = time.monotonic()
        with Lag(self.port) as lag:
            # In portions: a connection that sends nothing for ten seconds is closed.
            for first in range(rows, rows + number, _PORTION):
                self.client.ask("open", number=min(_PORTION, rows + number - first))
                self.client.ask("send", body=body(1), is_stream=False, first=first)
            while self.gauge("tgi_queue_size") < number:
                time.sleep(0.2)
        result["fill_s"] = time.monotonic() - started
        result["fill_lag_p99_ms"], result["fill_lag_max_ms"] = lag.p99_ms, lag.max_ms
        result["router_mib"] = self.router_memory_bytes() / 2**20
        yield result

    def storm(self) -> dict[str, float]:
        """Every client hangs up at once, running and waiting: how late the event loop gets, and what it costs."""
        started, cpu = time.monotonic(), self.router_cpu_s
        with Lag(self.port) as lag:
            self.client.ask("close")
            time.sleep(_STORM_S)
        cpu_s = self.router_idle() - cpu
        if self.gauge("tgi_batch_current_size") or self.gauge("tgi_kv_blocks_live"):
            raise RuntimeError("the router still holds requests that nobody waits for")
        return {"seconds": time.monotonic() - started, "cpu_s": cpu_s, "lag_max_ms": lag.max_ms}

    def lag(self, seconds: float) -> dict[str, float]:
        """What the event loop is late by, measured for so long."""
        with Lag(self.port) as lag:
            time.sleep(seconds)
        return {"p99_ms": lag.p99_ms, "max_ms": lag.max_ms}


class Lag:
    """How long `GET /info` takes, which asks nobody: what the event loop is late by."""

    def __init__(self, port: int, every_s: float = 0.02) -> None:
        self._port, self._every_s = port, every_s
        self._values: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def __enter__(self) -> Lag:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _probe(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._over.wait(self._every_s):
            started = time.monotonic()
            connection.request("GET", "/info")
            connection.getresponse().read()
            self._values.append(time.monotonic() - started)
        connection.close()

    @property
    def p99_ms(self) -> float:
        return quantile(self._values, 0.99) * 1e3

    @property
    def max_ms(self) -> float:
        return max(self._values, default=0.0) * 1e3


def body(max_new_tokens: int, prompt: str = SHORT_PROMPT) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": max_new_tokens, "details": True}}


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0.0


def _raise_file_limit() -> None:
    """For ten thousand connections; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
