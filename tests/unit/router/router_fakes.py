"""A scheduler that plays a script, and everything around it that an HTTP test needs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer

from router.answers.formats.choice import ModelFormat
from router.api.app_state import AppState
from router.api.batches.service import Batches
from router.api.http.connection import Bounds, Connection
from router.api.response_store import ResponseStore
from router.config import RouterConfig
from router.events import Event, Failed, Finished, FinishReason, Token, TokenGenerated
from router.generation.inference import Inference
from router.generation.validation import Validator
from router.grammar.checker import GrammarChecker
from router.keys.accounts import Accounts
from router.limits import ServingLimits, ShardInfo
from router.lora.registry import AdapterRegistry
from router.metrics import Metrics
from router.request import ValidRequest
from router.request_log import RequestLog
from router.server.app import create_app
from router.server.stop import Server
from router.template.renderer import Renderer
from router.template.template import ChatTemplate
from router.text.tokenizer import PromptTokenizer
from wire.keys import Key
from wire.tracing import Tracing

LIMITS = ServingLimits(
    max_concurrent_requests=4,
    max_best_of=2,
    max_stop_sequences=4,
    max_top_n_tokens=5,
    max_client_batch_size=4,
    max_input_tokens=2000,
    max_total_tokens=2048,
    max_batch_prefill_tokens=4096,
    default_prefill_tokens=4096,
    max_batch_total_tokens=8192,
    max_batch_size=None,
    max_waiting_tokens=20,
    waiting_served_ratio=1.2,
)
INFO = ShardInfo(
    dtype="float32",
    device_type="cpu",
    speculate=3,
    chunks=False,
    shares_prefixes=False,
    attention_impl="paged",
    block_size=16,
    pipeline_depth=2,
    kv_cache_dtype="float32",
    quantize="gptq",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Script = Callable[[ValidRequest], Sequence[Event | None]]
"""The events of a request; None stands for "nothing more, ever"."""


def says(
    *texts: str,
    reason: FinishReason = "length",
    seed: int | None = None,
    text: str | None = None,
    last_special: bool = False,
    top_tokens: Sequence[Token] = (),
) -> list[Event]:
    """The events of an answer, one token per text; the logprob of the n-th token is -n/4."""
    tokens = [Token(100 + index, piece, -index / 4) for index, piece in enumerate(texts)]
    tokens[-1] = replace(tokens[-1], special=last_special)
    tops = tuple(top_tokens)
    events: list[Event] = [TokenGenerated(token, tops) for token in tokens[:-1]]
    whole = "".join(texts[:-1] if last_special else texts) if text is None else text
    now = time.monotonic()
    return [*events, Finished(tokens[-1], tops, whole, len(texts), reason, seed, now, now)]


class FakeEntry:
    def __init__(
        self, request: ValidRequest, events: Sequence[Event | None], on_close: Callable[[FakeEntry], None]
    ) -> None:
        self.request = request
        self.queued_at = time.monotonic()
        self.closed = False
        self.dropped_as: str | None = "dropped"
        self._events = list(events)
        self._interrupted = asyncio.Event()
        self._on_close = on_close

    async def next_event(self) -> Event:
        await asyncio.sleep(0)
        event = self._events.pop(0)
        if event is None:
            await self._interrupted.wait()
            event = self._events.pop(0)
        assert event is not None
        if isinstance(event, Finished):
            return replace(event, queued_at=self.queued_at, started_at=self.queued_at)
        return event

    def answered(self, event: TokenGenerated, num_tokens: int) -> Finished:
        """As the scheduler's entry."""
        at = self.queued_at
        return Finished(event.token, event.top_tokens, "", num_tokens, "stop_sequence", None, at, at)

    def withdraw(self) -> None:
        """As the scheduler's entry."""
        self.dropped_as = None

    def interrupt(self, event: Event) -> None:
        """What comes after all where the script says "nothing more"."""
        self._events.append(event)
        self._interrupted.set()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close(self)


class FakeScheduler:
    """Answers each request by `script`; remembers what it was given."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or (lambda request: says(" one", " two"))
        self.submitted: list[ValidRequest] = []
        self.open: list[FakeEntry] = []
        self.healthy = True
        self.most_new_tokens: Callable[..., int] = lambda input_length, num_images=0: 1 << 20
        self.wait_s = 0.0
        self.failure: BaseException | None = None
        self.adapters_in_use: tuple[set[str], set[str]] = set(), set()
        self.most_adapters: int | None = None
        self.queued_by_key: dict[str, int] = {}

    def submit(self, request: ValidRequest) -> FakeEntry:
        self.submitted.append(request)
        entry = FakeEntry(request, self.script(request), lambda closed: self.open.remove(closed))
        self.open.append(entry)
        return entry

    async def check_health(self) -> bool:
        return self.healthy

    @property
    def estimated_wait_s(self) -> float:
        return self.wait_s

    @property
    def last(self) -> ValidRequest:
        return self.submitted[-1]


class Router:
    """The app on a fake scheduler; `post` and `get` talk to it in process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script | None = None,
        *,
        limits: ServingLimits = LIMITS,
        info: ShardInfo = INFO,
        config: RouterConfig | None = None,
        templates: dict[str, str] | None = None,
        tracing: Tracing | None = None,
        renderer: Renderer | None = None,
        grammars: GrammarChecker | None = None,
        model_format: ModelFormat | None = None,
        template_defaults: dict[str, Any] | None = None,
        sampling_defaults: dict[str, float] | None = None,
        adapters: AdapterRegistry | None = None,
        scheduler: FakeScheduler | None = None,
        keys: Sequence[Key] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or RouterConfig(tokenizer_name="some/model")
        self.scheduler = scheduler or FakeScheduler(script)
        self.metrics = Metrics()
        self.tokenizer = PromptTokenizer(Tokenizer.from_str(tokenizer.to_str()), num_workers=2)
        # Tokens of scripts have the text that they say, not that of their ids.
        self.tokenizer.token_bytes.update(dict.fromkeys(range(1000), b""))
        self._own_grammars = GrammarChecker() if grammars is None else None
        self.grammars = None if config.disable_grammar_support else grammars or self._own_grammars
        adapters = AdapterRegistry(info.adapters, self.metrics) if adapters is None else adapters
        validator = Validator(
            self.tokenizer,
            limits,
            info,
            most_new_tokens=lambda *sizes: self.scheduler.most_new_tokens(*sizes),
            grammars=self.grammars,
            adapters=adapters,
        )
        self.inference = Inference(
            scheduler=self.scheduler,
            validator=validator,
            tokenizer=self.tokenizer,
            limits=limits,
            metrics=self.metrics,
            adapters=adapters,
            model_names=(*config.served_model_name, config.tokenizer_name),
        )
        self.accounts = Accounts(keys, self.metrics, clock, part=config.limits_of_keys) if keys else None
        self.chat_template = ChatTemplate(
            {"default": CHAT_TEMPLATE} if templates is None else templates, {}, renderer=renderer
        )
        state = AppState(
            config=config,
            info=info,
            inference=self.inference,
            chat_template=self.chat_template,
            model_format=model_format or ModelFormat(),
            template_defaults=template_defaults or {},
            sampling_defaults=sampling_defaults or {},
            model_id=config.tokenizer_name,
            responses=ResponseStore(config.response_store) if config.response_store else None,
            created=1_700_000_000,
        )
        self._server: uvicorn.Server | None = None
        self.resources = contextlib.ExitStack()
        self.batches = Batches.open(config, limits.max_concurrent_requests, self.metrics, config.front_uds)
        self.app: FastAPI = create_app(
            state,
            api_key=config.api_key,
            accounts=self.accounts,
            allow_origins=config.cors_allow_origin,
            tracing=tracing,
            request_log=RequestLog.of(config, self.metrics, self.resources),
            batches=self.batches,
        )

    async def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await client.request(method, path, **arguments)

    async def post(self, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> httpx.Response:
        content = json.dumps(body).encode() if raw is None else raw
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.request("POST", path, content=content, headers=sent)

    async def get(self, path: str) -> httpx.Response:
        return await self.request("GET", path)

    async def refused(self, path: str, raw: bytes, *statuses: int) -> dict[str, str]:
        """The message and TGI's type of the error that a body is answered with, which must have one of these
        statuses; without any that of a request that is invalid."""
        answer = await self.post(path, raw=raw)
        is_right = answer.status_code in statuses if statuses else is_invalid(answer)
        assert is_right, (raw[:200], answer.status_code, answer.text)
        body = {"error": message_of(answer), "error_type": answer.json()["error_type"]}
        assert isinstance(body["error_type"], str) and len(body["error"]) < 1000
        assert self.scheduler.submitted == []
        self.assert_idle()
        return body

    def assert_idle(self) -> None:
        """Every permit is back and every entry closed."""
        assert self.inference.permit_pool.num_taken == 0
        assert self.scheduler.open == []

    @property
    def connections(self) -> list[Connection]:
        """Open ones, while it listens."""
        return [one for one in self._held if isinstance(one, Connection)]

    @property
    def num_connections(self) -> int:
        """With those that have not shaken hands yet."""
        return len(self._held)

    @property
    def _held(self) -> set[Any]:
        return set() if self._server is None else set(self._server.server_state.connections)

    def close(self) -> None:
        self.resources.close()
        if self.batches is not None:
            self.batches.folder.close()
        self.tokenizer.close()
        self.chat_template.close()
        if self._own_grammars is not None:
            self._own_grammars.close()

    @contextlib.asynccontextmanager
    async def listening(
        self,
        bounds: Bounds = Bounds(),  # noqa: B008
        keep_alive_s: int = 5,
        context: ssl.SSLContext | None = None,
    ) -> AsyncIterator[int]:
        """A real server on a port of the machine's choice. `context`: it speaks TLS."""
        config = uvicorn.Config(
            self.app,
            http=functools.partial(Connection, bounds=bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = context
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            listener.setblocking(False)
            server = self._server = Server(config, bounds)
            task = asyncio.create_task(server._serve([listener]))
            await until(lambda: server.started)
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True
                await task


def message_of(answer: httpx.Response) -> str:
    """What a refusal says, whose form must be that of its route's API."""
    body, path = answer.json(), answer.request.url.path
    if path.startswith("/v1/messages"):
        assert list(body) == ["type", "error", "request_id"] and list(body["error"]) == ["type", "message"]
    elif path.startswith("/v1/"):
        assert list(body) == ["error", "error_type"]
        assert list(body["error"]) == ["message", "type", "param", "code"]
    else:
        assert list(body) == ["error", "error_type"] and isinstance(body["error"], str)
        return str(body["error"])
    return str(body["error"]["message"])


def is_invalid(answer: httpx.Response) -> bool:
    """Whether the request is refused for what it asks for."""
    message_of(answer)
    return answer.status_code == (400 if answer.request.url.path.startswith("/v1/") else 422)


def failing(*texts: str, error: Exception) -> list[Event]:
    """Some tokens, then a failure."""
    return [*[TokenGenerated(Token(index, text, -0.5)) for index, text in enumerate(texts)], Failed(error)]


def data_of(stream: bytes) -> list[Any]:
    """The events of a stream, checked for their framing; `[DONE]` as text."""
    assert stream.endswith(b"\n\n")
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block and not block.startswith("data:  ")
        text = block.removeprefix("data: ")
        events.append("[DONE]" if text == "[DONE]" else json.loads(text))
    return events


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for something that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
