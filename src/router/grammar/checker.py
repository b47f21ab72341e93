"""Whether clients' grammars compile, in bounded processes; outcomes are remembered and shared."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from router.errors import GrammarError
from router.grammar.listed import listed
from router.worker.pair import LARGE_BYTES, WorkerPair
from wire.worker.process import WorkerEndedError

logger = logging.getLogger(__name__)

GrammarKind = Literal["json", "regex", "lark"]

TIMEOUT_S = 5.0
CACHE_BYTES = 8 << 20
_MAX_SLOW_WAITING = 64
_ENTRY_BYTES = 200
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class AskedGrammar:
    """TGI's `grammar` or OpenAI's `response_format`, as sent."""

    type: Literal["json", "json_object", "json_schema", "regex", "grammar", "text", "lark"]
    # Schema, regex, or for `grammar` Lark or EBNF; `lark` is the router's own.
    value: Any = None
    # Schemas that become any object if they do not compile.
    loose: tuple[str, ...] = ()
    # Left out if even that does not compile.
    is_optional: bool = False
    # The client's.
    field: str = "grammar"
    # Places in the schema that are not the client's, and what to say instead.
    words: tuple[tuple[str, str], ...] = ()

    def in_clients_words(self, text: str) -> str:
        """Return a sentence about the schema, about what the client sent."""
        for place, said in self.words:
            text = re.sub(re.escape(place) + r"(?=[/:\s]|$)", said.replace("\\", r"\\"), text)
        return text


def read_grammar(asked: AskedGrammar) -> tuple[GrammarKind, str] | None:
    """Return the kind and text that was asked for, if any."""
    value = asked.value
    if asked.type == "text":
        return None
    if asked.type == "lark":
        return "lark", value
    if asked.type == "regex":
        if not isinstance(value, str) or not value:
            raise _fault(asked, "a `regex` grammar needs a string that is not empty")
        return "regex", value
    if asked.type == "grammar":
        if not isinstance(value, str) or not value:
            raise _fault(asked, "Lark or EBNF must be a string that is not empty")
        return "lark", listed("start: @answer", {"name": "answer", "text_grammar": value})
    if asked.type == "json_schema":
        if not isinstance(value, dict) or "schema" not in value:
            raise _fault(asked, "a `json_schema` grammar needs an object with `schema`")
        value = value["schema"]
    elif asked.type == "json_object" and value is None:
        return "json", _ANY_OBJECT
    if asked.type == "json" and value is None:
        raise _fault(asked, "the type `json` needs a schema in `value`; any JSON is the type `json_object`")
    if isinstance(value, str):
        return "json", value
    if not isinstance(value, dict):
        raise _fault(asked, "a JSON schema must be an object, or a string that holds one")
    return "json", orjson.dumps(value).decode()


def _fault(asked: AskedGrammar, text: str) -> GrammarError:
    return GrammarError(f"grammar is not valid: {text}", param=asked.field)


@dataclass(frozen=True)
class _Outcome:
    grammar: str | None
    fault: str = ""  # also what was wrong with schemas that became any object

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + len((self.grammar or "").encode()) + len(self.fault.encode())


@dataclass
class _Check:
    """A compilation under way, and its waiters."""

    outcome: asyncio.Task[_Outcome]
    num_waiting: int = 0


class GrammarChecker:
    """Checks grammars in processes started when needed."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, cache_bytes: int = CACHE_BYTES) -> None:
        self._timeout_s = timeout_s
        self._workers = WorkerPair(
            "router.grammar.worker", limit_s=timeout_s, max_waiting_cost=_MAX_SLOW_WAITING * LARGE_BYTES
        )
        self._running: dict[bytes, _Check] = {}
        self._known: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._num_bytes = 0

    async def check(self, kind: GrammarKind, text: str, loose: Sequence[str] = ()) -> str:
        """Return the shards' text, loosened as `AskedGrammar`.

        Raises:
            ValidationError: It does not compile; OverloadedError while too many wait.
        """
        key = hashlib.sha256(f"{kind} {' '.join(loose)} {text}".encode()).digest()
        outcome = self._known.get(key)
        if outcome is not None:
            self._known.move_to_end(key)
        else:
            outcome = await self._shared(key, orjson.dumps([kind, text, loose]))
        if outcome.grammar is None:
            raise GrammarError(f"grammar is not valid: {outcome.fault}")
        if outcome.fault:
            logger.info("calls of a request may have any arguments instead of their schema's: %s", outcome.fault)
        return outcome.grammar

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        self._workers.close()

    async def _shared(self, key: bytes, asked: bytes) -> _Outcome:
        """Share a compilation, dropped with its last waiter."""
        check = self._running.get(key)
        if check is None:
            check = self._running[key] = _Check(asyncio.create_task(self._outcome(key, asked)))
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.outcome)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting and self._running.get(key) is check:
                del self._running[key]
                check.outcome.cancel()

    async def _outcome(self, key: bytes, asked: bytes) -> _Outcome:
        try:
            reply = orjson.loads(await self._workers.ask(asked))
            outcome = _Outcome(reply.get("grammar"), reply.get("fault", ""))
        except TimeoutError:
            logger.warning("a grammar of %d bytes took more than %g s to compile", len(asked), self._timeout_s)
            outcome = _Outcome(None, f"it takes more than {self._timeout_s:g} s to compile")
        except WorkerEndedError:
            logger.warning("a grammar of %d bytes ended the process that compiles it", len(asked))
            outcome = _Outcome(None, "it takes too much memory or time to compile")
        except (OSError, RuntimeError) as error:  # RuntimeError: closed in the meantime
            logger.error("the process that checks grammars cannot be started: %s", error)
            return _Outcome(None, "it cannot be checked at the moment")
        self._remember(key, outcome)
        return outcome

    def _remember(self, key: bytes, outcome: _Outcome) -> None:
        self._known[key] = outcome
        self._num_bytes += outcome.num_bytes
        while self._num_bytes > self._cache_bytes:
            _, oldest = self._known.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
