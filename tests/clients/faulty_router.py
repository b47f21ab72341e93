"""A router that fails on demand: the real HTTP routes in front of a scheduler that plays a script.

A healthy model server never gives a client 424 or 500, so the words of the prompt choose the failure here. Every POST
needs the key. Arguments: port, key; `tests/unit/router` must be on the path.

Below /thinking is a model that reasons before it answers, below /base one without a chat template; neither needs a key.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn
from hostile_answer import HOSTILE
from page_answers import ANSWERS, STORY
from router_fakes import FakeEntry, FakeScheduler, Router, failing, says
from tokenizers import Tokenizer

from router.answers.formats.choice import ModelFormat
from router.answers.formats.reasoning import named
from router.config import RouterConfig
from router.errors import GenerationError, IncompleteError
from router.events import Event
from router.request import ValidRequest
from wire import demo_model

PIECE = 7
STEP_S = 0.02


def script(request: ValidRequest) -> Sequence[Event | None]:
    """`break down`: a failure of the shards; `stop short`: an end without a last token; both after some tokens.
    `attack`: an answer that attacks who shows it as HTML. Words of `ANSWERS`: that answer; `story`: a long one."""
    if "break down" in request.inputs:
        return failing("one", " two", error=GenerationError("Server error: out of memory"))
    if "stop short" in request.inputs:
        return failing("one", " two", error=IncompleteError())
    last = request.inputs.rsplit("<|user|>", 1)[-1]
    asked = {"attack": HOSTILE, "story": STORY, **ANSWERS}
    text = next((answer for word, answer in asked.items() if word in last), None)
    if text is None:
        return says("one", " two")
    return says(*(text[at : at + PIECE] for at in range(0, len(text), PIECE)), reason="eos_token")


class SlowEntry(FakeEntry):
    """A story comes as slowly as from a model."""

    async def next_event(self) -> Event:
        if "story" in self.request.inputs or "slowly" in self.request.inputs:
            await asyncio.sleep(STEP_S)
        return await super().next_event()


class SlowScheduler(FakeScheduler):
    def submit(self, request: ValidRequest) -> FakeEntry:
        self.submitted.append(request)
        entry = SlowEntry(request, self.script(request), lambda closed: self.open.remove(closed))
        self.open.append(entry)
        return entry


def app_of(tokenizer: Tokenizer, **options: Any) -> Any:
    return Router(tokenizer, scheduler=SlowScheduler(script), **options).app


class Prefixes:
    """Several apps, each below a prefix of its own, which it does not see; as behind a proxy."""

    def __init__(self, apps: Mapping[str, Any]) -> None:
        self._apps = apps

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        prefix = next(prefix for prefix in self._apps if path.startswith(prefix))
        if prefix:
            scope = {
                **scope,
                "path": path.removeprefix(prefix),
                "raw_path": scope["raw_path"].removeprefix(prefix.encode()),
            }
        await self._apps[prefix](scope, receive, send)


def main() -> None:
    port, key = int(sys.argv[1]), sys.argv[2]
    tokenizer = Tokenizer.from_file(str(demo_model.path() / "tokenizer.json"))
    apps = {
        "/thinking": app_of(
            tokenizer,
            config=RouterConfig(tokenizer_name="thinking"),
            model_format=ModelFormat(style=named("think")),
        ),
        "/base": app_of(tokenizer, config=RouterConfig(tokenizer_name="some/base-model"), templates={}),
        "": app_of(tokenizer, config=RouterConfig(tokenizer_name="faulty", api_key=key)),
    }
    uvicorn.run(Prefixes(apps), host="127.0.0.1", port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
