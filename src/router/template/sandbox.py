"""The templates' environment: transformers' set-up, with bounded output.

Jinja's sandbox keeps templates from Python, but not from `'a' * 10**9`; the process has bounds too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED_CHARACTERS = 16 * 2**20


def _concat(pieces: Iterable[str]) -> str:
    """Join what a template, macro or block printed."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            raise SecurityError("the template makes a value that is too large")
        parts.append(piece)
    return "".join(parts)


class _Generator(CodeGenerator):
    """Compiles without computing: the router compiles too, unbounded."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        raise nodes.Impossible


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed and immutable."""

    code_generator_class = _Generator
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace


class _GenerationTag(Extension):
    """`{% generation %}` prints its content, marked for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(lineno)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """Refuses names with leading underscores."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: leading underscore")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write plain JSON, unescaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
