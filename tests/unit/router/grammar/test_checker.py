"""Grammars from clients: every form, what is refused, the bounds of the process that compiles them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from router_fakes import Router, is_invalid, message_of, until

from router.config import RouterConfig
from router.errors import OverloadedError, ValidationError
from router.grammar.checker import AskedGrammar, GrammarChecker, read_grammar
from router.worker import pair
from router.worker.pair import LARGE_BYTES
from wire.worker.process import WorkerEndedError

MakeChecker = Callable[..., GrammarChecker]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = json.dumps(SCHEMA | {"additionalProperties": False}, separators=(",", ":"))
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    opened = GrammarChecker()
    yield opened
    opened.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


@pytest.mark.parametrize(
    ("grammar", "kind", "text"),
    [
        ({"type": "json", "value": SCHEMA}, "json", CLOSED),
        ({"type": "json", "value": json.dumps(SCHEMA)}, "json", CLOSED),
        ({"type": "json_object", "value": SCHEMA}, "json", CLOSED),
        ({"type": "json_object", "schema": SCHEMA}, "json", CLOSED),
        ({"type": "json_object"}, "json", '{"type":"object"}'),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, "json", CLOSED),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, "json", CLOSED),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}, "json", CLOSED),
        ({"type": "regex", "value": "[0-9]{3}"}, "regex", "[0-9]{3}"),
        ({"type": "text"}, "none", ""),
    ],
)
async def test_every_form_reaches_the_scheduler(router: Router, grammar: Any, kind: str, text: str) -> None:
    native = {"inputs": "Hi", "parameters": {"grammar": grammar}}
    for path, body in (("/generate", native), (CHAT, chat(response_format=grammar))):
        answer = await router.post(path, body)
        assert answer.status_code == 200, answer.text
        sampling = router.scheduler.last.sampling
        assert (sampling.grammar_kind, sampling.grammar) == (kind, text)
    router.assert_idle()


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json"},
        {"type": "json", "value": 1},
        {"type": "json", "value": "no schema"},
        {"type": "json", "value": "[1]"},
        {"type": "json", "value": "true"},
        {"type": "json", "value": {"type": "objekt"}},
        {"type": "json", "value": {"$ref": "http://127.0.0.1:9/schema.json"}},
        {"type": "json", "value": {"$ref": "#/$defs/missing"}},
        {"type": "json", "value": {"type": "string", "pattern": "(?=a)b"}},
        {"type": "json", "value": {"type": "integer", "minimum": "3"}},
        {"type": "json", "value": {"type": "array", "uniqueItems": True}},
        {"type": "json", "value": {"enum": []}},
        {"type": "json", "value": '{"anyOf":[' * 900 + "{}" + "]}" * 900},
        {"type": "json", "value": '{"items":' * 100_000 + "{}" + "}" * 100_000},
        {"type": "json_schema"},
        {"type": "json_schema", "value": {"name": "x"}},
        {"type": "regex"},
        {"type": "regex", "value": ""},
        {"type": "regex", "value": 5},
        {"type": "regex", "value": "a("},
        {"type": "regex", "value": "a(?=b)"},
        {"type": "regex", "value": r"(a)\1"},
        {"type": "regex", "value": "a{4294967295}"},
        {"type": "regex", "value": "a{9999999999}"},
        {"type": "regex", "value": "(" * 9 + "a" + "{9})" * 9},
        {"type": "regex", "value": "(" * 50_000 + "a" + ")" * 50_000},
    ],
)
async def test_what_cannot_be_had_is_the_requests_own_error(router: Router, grammar: Any) -> None:
    native = {"inputs": "Hi", "parameters": {"grammar": grammar}}
    for path, body in (("/generate", native), ("/generate_stream", native), (CHAT, chat(response_format=grammar))):
        answer = await router.post(path, body)
        assert is_invalid(answer), answer.text
        assert answer.json()["error_type"] == "validation"
        said = message_of(answer).removeprefix("Input validation error: ")
        assert said.startswith("grammar is not valid: ")
        assert len(said) < 400 and "\n" not in said
    assert router.scheduler.submitted == []
    router.assert_idle()
    fine = {"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": "a+"}}}
    assert (await router.post("/generate", fine)).status_code == 200


async def test_switched_off(make_router: Callable[..., Router]) -> None:
    router = make_router(config=RouterConfig(tokenizer_name="some/model", disable_grammar_support=True))
    for grammar in ({"type": "regex", "value": "a"}, {"type": "json_object"}):
        answer = await router.post(CHAT, chat(response_format=grammar))
        assert is_invalid(answer) and "disabled" in message_of(answer)
    assert (await router.post(CHAT, chat(response_format={"type": "text"}))).status_code == 200


async def test_every_choice_has_the_grammar(router: Router) -> None:
    answer = await router.post(CHAT, chat(response_format={"type": "json_object"}, n=3))
    assert answer.status_code == 200
    assert [one.sampling.grammar_kind for one in router.scheduler.submitted] == ["json"] * 3


# The process.


async def test_equal_grammars_at_once_are_compiled_once(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    ask = checker._workers.ask

    async def counting(data: bytes) -> bytes:
        compiled.append(json.loads(data)[1])
        await asyncio.sleep(0.05)
        return await ask(data)

    monkeypatch.setattr(checker._workers, "ask", counting)
    first = asyncio.ensure_future(checker.check("regex", "once+"))
    others = [asyncio.ensure_future(checker.check("regex", "once+")) for _ in range(5)]
    await asyncio.sleep(0.01)
    first.cancel()
    assert await asyncio.gather(*others) == ["once+"] * 5
    assert await checker.check("regex", "once+") == "once+"
    for _ in range(2):
        with pytest.raises(ValidationError):
            await checker.check("regex", "once(")
    assert compiled == ["once+", "once("]


def dear(number: int) -> str:
    """A schema of some hundred bytes that takes seconds."""
    numbers = {f"n{i}": {"type": "integer", "multipleOf": 9973 + 100 * number + i} for i in range(50)}
    return json.dumps({"type": "object", "properties": numbers})


@pytest.fixture
def make_checker() -> Iterator[Callable[..., GrammarChecker]]:
    """Checkers that are closed at the end, however the test ends."""
    with contextlib.ExitStack() as made:
        yield lambda **options: made.enter_context(contextlib.closing(GrammarChecker(**options)))


async def test_what_takes_too_long_is_refused_and_remembered(
    make_checker: MakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_GRACE_S", 60.0)
    checker = make_checker(timeout_s=0.3)
    for _ in range(2):
        with pytest.raises(ValidationError, match=r"takes more than 0\.3 s"):
            await checker.check("json", dear(0))
    slow = checker._workers.slow.process.pid
    with pytest.raises(ValidationError, match=r"takes more than 0\.3 s"):
        await checker.check("json", dear(1))
    assert checker._workers.slow.process.pid == slow, "its fork alone has ended"


async def test_grammars_do_not_wait_for_dear_ones_which_leave_with_their_clients(
    make_checker: MakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = make_checker(timeout_s=60)
    slow = checker._workers.slow
    left = [asyncio.create_task(checker.check("json", dear(number))) for number in range(4)]
    await until(lambda: slow.current is not None)
    monkeypatch.setattr(pair, "QUICK_LIMIT_S", 60.0)  # of those that come now: a busy machine moves none of them
    for number in range(5):
        assert await checker.check("regex", f"x{number}") == f"x{number}"
    assert not any(task.done() for task in left)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    assert checker._running == {}
    large = json.dumps({"type": "integer", "description": "x" * LARGE_BYTES}, separators=(",", ":"))
    assert await asyncio.wait_for(checker.check("json", large), 60) == large
    assert slow.current is None


async def test_a_signal_that_comes_before_the_job_is_repeated(
    make_checker: MakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process knows nothing yet of what it is to leave, and would run it to its end."""
    sent: list[int] = []
    kill = os.kill

    def kill_but_once(pid: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            kill(pid, number)

    checker = make_checker(timeout_s=600)
    checker._workers.slow.process.start().send_signal(signal.SIGSTOP)
    left = asyncio.create_task(checker.check("json", dear(0)))
    slow = checker._workers.slow
    await until(lambda: slow.current is not None)
    monkeypatch.setattr(pair, "os", SimpleNamespace(kill=kill_but_once))
    left.cancel()
    await until(lambda: len(sent) == 1)
    assert slow.process._process is not None
    slow.process._process.send_signal(signal.SIGCONT)
    await until(lambda: slow.current is None)
    assert len(sent) > 1 and set(sent) == {signal.SIGALRM}


async def test_a_process_that_hangs_is_replaced(make_checker: MakeChecker) -> None:
    checker = make_checker(timeout_s=60)
    assert await checker.check("regex", "a") == "a"
    before = checker._workers.quick.process._process
    assert before is not None
    os.kill(before.pid, signal.SIGSTOP)
    assert await checker.check("regex", "b") == "b", "by the slow process"
    assert before.returncode is not None
    assert await checker.check("regex", "c") == "c"


async def test_a_process_that_was_killed_is_no_fault_of_the_request(
    make_checker: MakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = make_checker()
    assert await checker.check("regex", "a") == "a"
    quick = checker._workers.quick.process
    assert quick._process is not None
    quick._process.kill()
    assert await checker.check("regex", "b") == "b"
    monkeypatch.setattr(quick, "exchange", Mock(side_effect=WorkerEndedError("it ended with status -6")))
    with pytest.raises(ValidationError, match="too much memory or time"):
        await checker.check("regex", "c")
    checker.close()
    with pytest.raises(ValidationError, match="cannot be checked"):
        await checker.check("regex", "d")


async def test_memory_of_outcomes_is_bounded(make_checker: MakeChecker) -> None:
    checker = make_checker(cache_bytes=2000)
    for number in range(40):
        await checker.check("regex", f"x{number}")
    assert 0 < len(checker._known) < 10 and checker._num_bytes <= 2000


async def test_too_many_dear_ones_at_once_are_overload(
    make_checker: MakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.grammar.checker._MAX_SLOW_WAITING", 3)
    checker = make_checker(timeout_s=600)
    slow = checker._workers.slow.process.start()
    slow.send_signal(signal.SIGSTOP)  # the first is never done
    asked = [asyncio.create_task(checker.check("json", dear(number))) for number in range(9)]
    await until(lambda: sum(task.done() for task in asked) == 5)
    assert all(isinstance(task.exception(), OverloadedError) for task in asked if task.done())
    for task in asked:
        task.cancel()
    slow.send_signal(signal.SIGCONT)
    await asyncio.gather(*asked, return_exceptions=True)


def test_a_schema_as_text_stays_text() -> None:
    assert read_grammar(AskedGrammar("json", '{"b":1, "a":2}')) == ("json", '{"b":1, "a":2}')
    assert read_grammar(AskedGrammar("json", {"b": 1, "a": 2})) == ("json", '{"b":1,"a":2}')
