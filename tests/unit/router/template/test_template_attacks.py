"""Templates that would take the router's time or memory: each ends as an error, in the worker process.

They come from a model or its operator, never from a request; what they are fed comes from clients.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from router_fakes import until

from router.errors import TemplateError
from router.template.messages import Turn
from router.template.renderer import Renderer
from router.template.template import ChatTemplate
from router.worker import pair
from router.worker.pair import LARGE_BYTES
from wire.worker.process import WorkerEndedError

USER = Turn(role="user", parts="Hello")
_BIG = "{% set b = 'x' * 1000000 %}"
_NAMESPACE = "{% set n = namespace(l=[], x='aa') %}"
ATTACKS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{% set _ = messages.append(1) %}",
    "{{ namespace(_x=1) }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ 2 ** (10 ** 9) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set b %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = b %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', 'aaaa') %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aaaa') %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ range(10**9) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content.nothing.at_all }}",
    "{{ messages[7].role }}",
    "{{ 1 + 'a' }}",
    # Single steps whose result is far larger than what goes in.
    _BIG + "{{ ('%s' * 300) % ((b,) * 300 + ()) }}",
    _BIG + "{{ ('%(b)s' * 300) % {'b': b} }}",
    _BIG + "{{ ('%s' * 300) | format(b, b) }}",
    _BIG + "{{ ('{0}' * 300).format(b) }}",
    _BIG + "{{ ('{b}' * 300).format_map({'b': b}) }}",
    _BIG + "{{ b.translate({120: 'y' * 300}) }}",
    _BIG + "{{ b.join(b) }}",
    _BIG + "{{ b.join(['a'] * 300 | map('upper')) }}",
    _BIG + "{{ ([b] * 300) | string }}",
    _BIG + "{{ [b] * 300 }}",
    _BIG + "{{ ([b] * 300) | tojson }}",
    _BIG + "{{ ([b] * 300) | pprint }}",
    _BIG + "{{ ([b] * 300) | join | upper }}",
    _BIG + "{{ b | wordwrap(1) | wordwrap(1, wrapstring='y' * 100) }}",
    "{{ 'a'.expandtabs(10**9) ~ '\t'.expandtabs(10**9) }}",
    # Many values that are each small enough.
    _NAMESPACE + "{% for i in range(9999) %}{% set n.l = n.l + ['a' * (1000000 + i)] %}{% endfor %}",
    _NAMESPACE + "{% for i in range(9999) %}{% set n.l = [n.l, 'a' * (1000000 + i)] %}{% endfor %}",
    _NAMESPACE + "{% for i in range(60) %}{% set n.l = n.l + n.l + [1] %}{% endfor %}",
    _NAMESPACE + "{% for i in range(60) %}{% set n.l = dict(a=n.l, b=n.l) %}{% endfor %}{{ n.l | tojson }}",
    # Inside of one step that nothing can interrupt.
    _NAMESPACE + "{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    _NAMESPACE + "{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Each takes the time that a template may.
@pytest.mark.parametrize(
    "source",
    [pytest.param(one, marks=() if number % 4 == 0 else pytest.mark.long) for number, one in enumerate(ATTACKS)],
)
async def test_an_attack_ends_as_a_template_error(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    before = _resident_bytes()
    with pytest.raises(TemplateError):
        async with asyncio.timeout(60):
            await ChatTemplate({"default": source}, {}, renderer=renderer).render([USER])
    assert _resident_bytes() - before < 200 << 20
    monkeypatch.setattr(renderer.workers, "_limit_s", 60.0)  # of the processes that had the attack, on a busy machine
    assert await ChatTemplate({"default": "ok"}, {}, renderer=renderer).render([USER]) == "ok"


@pytest.fixture
def own_renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Renderer]:
    """With time enough for a busy machine: an endless loop ends after 3 s, and no process is replaced."""
    monkeypatch.setattr("router.template.renderer.TIME_LIMIT_S", 3.0)
    monkeypatch.setattr(pair, "_GRACE_S", 60.0)
    one = Renderer()
    yield one
    one.close()


_LOOPS = (
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}ok"
)


async def test_the_event_loop_goes_on_while_a_template_renders(own_renderer: Renderer) -> None:
    template = ChatTemplate({"default": _LOOPS}, {}, renderer=own_renderer)
    assert await template.render([USER]) == "ok"
    rendering = asyncio.create_task(template.render([Turn(role="user", parts="loop")]))
    await until(lambda: own_renderer.workers.slow.current is not None)  # seen from the loop, so the loop runs beside it
    assert not rendering.done()
    rendering.cancel()


async def test_chats_do_not_wait_for_long_ones(own_renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_renderer.workers, "_limit_s", 60.0)
    template = ChatTemplate({"default": _LOOPS}, {}, renderer=own_renderer)
    large, slow = Turn(role="user", parts="x" * LARGE_BYTES), Turn(role="user", parts="loop")
    waiting = [asyncio.create_task(template.render([slow]))]
    await until(lambda: own_renderer.workers.slow.current is not None)
    waiting += [asyncio.create_task(template.render([large])) for _ in range(2)]
    monkeypatch.setattr(pair, "QUICK_LIMIT_S", 60.0)  # of those that come now: a busy machine moves none of them
    for _ in range(3):
        assert await template.render([USER]) == "ok"
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    assert await asyncio.gather(*waiting[1:]) == ["ok", "ok"]


async def test_an_endless_template_is_interrupted_and_its_process_lives_on(own_renderer: Renderer) -> None:
    template = ChatTemplate({"default": _LOOPS}, {}, renderer=own_renderer)
    assert await template.render([USER]) == "ok"
    before = own_renderer.workers.quick.process.pid
    with pytest.raises(TemplateError, match="too long"):
        await template.render([Turn(role="user", parts="loop")])
    assert await template.render([USER]) == "ok"
    assert own_renderer.workers.quick.process.pid == before


async def test_a_caller_who_leaves_takes_the_rendering_along(own_renderer: Renderer) -> None:
    template = ChatTemplate({"default": _LOOPS}, {}, renderer=own_renderer)
    assert await template.render([USER]) == "ok"
    rendering = asyncio.create_task(template.render([Turn(role="user", parts="loop")]))
    waiting = asyncio.create_task(template.render([Turn(role="user", parts="loop")]))
    slow = own_renderer.workers.slow
    await until(lambda: slow.current is not None and slow.process.pid is not None)
    before = slow.process.pid
    waiting.cancel()
    rendering.cancel()
    for task in (rendering, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    long_chat = [Turn(role="user", parts="x" * LARGE_BYTES)]
    assert await asyncio.wait_for(template.render(long_chat), 60) == "ok"
    assert slow.process.pid == before


async def test_a_process_that_was_killed_is_no_fault_of_the_request(own_renderer: Renderer) -> None:
    template = ChatTemplate({"default": "ok"}, {}, renderer=own_renderer)
    assert await template.render([USER]) == "ok"
    process: Any = own_renderer.workers.quick.process._process
    process.kill()
    process.wait()
    assert await template.render([USER]) == "ok"
    assert own_renderer.workers.quick.process.pid != process.pid


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerEndedError("it ended with status -6"), "the template takes too much memory"),
        (ConnectionResetError("the process has ended"), "it cannot be rendered at the moment"),
    ],
)
async def test_an_end_while_rendering_is_not_one_while_starting(
    own_renderer: Renderer, monkeypatch: pytest.MonkeyPatch, error: OSError, text: str
) -> None:
    monkeypatch.setattr(own_renderer.workers.quick.process, "exchange", Mock(side_effect=error))
    with pytest.raises(TemplateError, match=text):
        await ChatTemplate({"default": "ok"}, {}, renderer=own_renderer).render([USER])


async def test_what_is_nested_too_deeply(renderer: Renderer) -> None:
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(TemplateError, match="deeply"):
        await ChatTemplate({"default": "ok"}, {}, renderer=renderer).render([USER], variables={"x": deep})
