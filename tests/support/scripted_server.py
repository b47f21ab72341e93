"""A scripted model behind real HTTP, with any number of chat templates: one shard, one scheduler, a port for each.

Everything is the product's but one thing: where a rendered prompt has the mark of a script, the answer is put in its
place, at the distance from the prompt's end at which the model copies it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import socket
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from support.scripted_model import DISTANCE, Piece, ScriptedModel
from support.shard_process import ShardProcess

from router.answers.formats.choice import ModelFormat, choose
from router.api.app_state import AppState
from router.api.http.connection import Bounds, Connection
from router.config import RouterConfig
from router.grammar.checker import GrammarChecker
from router.lora.registry import AdapterRegistry
from router.metrics import Metrics
from router.server.app import create_app
from router.server.server import _app_state
from router.server.startup import connect_and_warm_up
from router.server.stop import Server
from router.template.renderer import Renderer
from router.template.template import ChatTemplate
from router.text import model_files
from router.text.tokenizer import PromptTokenizer

T = TypeVar("T")
_SCRIPT = re.compile(r"<\|script (\d+)\|>")


@dataclass(frozen=True)
class Served:
    """A server with a chat template. `url` ends without a slash."""

    url: str
    format: ModelFormat

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)


class ScriptedServer:
    """Use it in a `with` statement."""

    def __init__(self, model: ScriptedModel, folder: Path, **options: Any) -> None:
        """`folder`: for sockets and logs; `options`: of the router."""
        self.model = model
        self._folder = folder
        self._options = options
        self._scripts: dict[int, list[str]] = {}
        self._numbers = itertools.count()
        self._served: dict[object, Served] = {}
        self._loop = asyncio.new_event_loop()
        self._resources = contextlib.ExitStack()
        self._servers: list[tuple[Server, asyncio.Task[None]]] = []

    def __enter__(self) -> ScriptedServer:
        with contextlib.ExitStack() as resources:
            shard = ShardProcess(self.model.path, self._folder / "s")
            resources.callback(shard.stop)
            shard.wait_ready()
            thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            thread.start()
            resources.callback(self._loop.close)
            resources.callback(thread.join)
            resources.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self._renderer = resources.enter_context(contextlib.closing(Renderer()))
            resources.callback(lambda: self._run(self._stop()))
            self._run(self._start(shard.socket))
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def says(self, *answer: Piece, ends: bool = True) -> str:
        """What a message must hold so that the model answers so. `ends`: with the model's end token."""
        return self.says_in_turn([answer], ends=ends)

    def says_in_turn(self, answers: list[tuple[Piece, ...]], *, ends: bool = True) -> str:
        """As `says`, of a prompt that is rendered several times for one request."""
        number = next(self._numbers)
        self._scripts[number] = [
            self.model.written(self.model.ids(*answer) + ([self.model.end] if ends else [])) for answer in answers
        ]
        return f"<|script {number}|>"

    def at(
        self,
        template: str,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        tokens: bool = True,
        **config: Any,
    ) -> Served:
        """The server with this template; the same one for the same arguments. `tokens`: marks that the vocabulary has
        are known by their ids; `config`: more options of the router."""
        key = (template, tool_call_parser, reasoning_parser, tokens, tuple(sorted(config.items())))
        if key not in self._served:
            parsers = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
            self._served[key] = self._run(self._serve(template, parsers, tokens, config))
        return self._served[key]

    def filled(self, prompt: str) -> str:
        """A prompt with its script written out."""
        found = list(_SCRIPT.finditer(prompt))
        if not found:
            return prompt
        mark = found[-1]
        answers = self._scripts[int(mark[1])]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        behind = prompt[mark.end() :]
        left = DISTANCE - answer.count("<|t") - len(self.model.ids(behind))
        assert left >= 0, f"{-left} tokens too many in the answer and behind it"
        return prompt[: mark.start()] + answer + self.model.written([self.model.end]) * left + behind

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _start(self, socket_path: Path) -> None:
        config = RouterConfig(
            tokenizer_name=str(self.model.path), master_shard_uds_path=str(socket_path), request_logprobs=True,
            **{"max_concurrent_requests": 256, "max_client_batch_size": 16} | self._options,
        )  # fmt: skip
        files = model_files.load(
            config.tokenizer_name, revision=None, tokenizer_config_path=None, chat_template=config.chat_template
        )
        self._tokenizer = PromptTokenizer.from_file(files.tokenizer_json, num_workers=1)
        self._grammars = GrammarChecker()
        metrics = Metrics()
        self._started = await connect_and_warm_up(
            config, metrics, max_positions=files.max_positions, tokenizer_max_length=files.tokenizer_max_length
        )
        adapters = AdapterRegistry((), metrics)
        template = ChatTemplate(files.templates, files.named_tokens, renderer=self._renderer)
        self._state = _app_state(
            config, files, self._tokenizer, template, ModelFormat(), self._grammars, None, metrics, self._started,
            adapters,
        )  # fmt: skip
        self._named_tokens = files.named_tokens
        self._scheduling = asyncio.create_task(self._started.scheduler.run())

    async def _serve(self, source: str, parsers: dict[str, str], tokens: bool, options: dict[str, Any]) -> Served:
        template = _ScriptedTemplate(self, {"default": source}, self._named_tokens, self._renderer)
        added = self._tokenizer.added_tokens if tokens else {}
        format = await choose(template, added, self._tokenizer.special_tokens, **parsers)
        config = replace(self._state.config, **options)
        state: AppState = replace(self._state, config=config, chat_template=template, model_format=format)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = Server(
            uvicorn.Config(
                create_app(state),
                http=functools.partial(Connection, bounds=Bounds()),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
            ),
            Bounds(),
        )
        self._servers.append((server, asyncio.create_task(server.serve([listener]))))
        while not server.started:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.002)
        return Served(f"http://127.0.0.1:{listener.getsockname()[1]}", format)

    async def _stop(self) -> None:
        for server, task in self._servers:
            server.should_exit = True
            await task
        await self._started.scheduler.close()
        await self._scheduling
        await self._started.shards.close()
        self._tokenizer.close()
        self._grammars.close()


class _ScriptedTemplate(ChatTemplate):
    """Writes scripts out."""

    def __init__(
        self, server: ScriptedServer, sources: Mapping[str, str], variables: Mapping[str, str], renderer: Renderer
    ) -> None:
        super().__init__(sources, variables, renderer=renderer)
        self._server = server

    async def render(self, *arguments: Any, **options: Any) -> str:
        return self._server.filled(await super().render(*arguments, **options))


def at_once(*questions: functools.partial[T]) -> list[T]:
    """The answers to all, asked together: a step of the model takes all of their rows."""
    with ThreadPoolExecutor(max(1, len(questions))) as pool:
        return [future.result() for future in [pool.submit(question) for question in questions]]
