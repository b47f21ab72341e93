"""The environment that chat templates run in: transformers' own set-up, plus bounds on the size of values.

A template comes from the model or the operator, what it renders comes from clients. Jinja's sandbox keeps it away from
Python; it does not keep it from `'a' * 10**9`. The bounds here give such a template a clear error and change no result
below them; what they do not see is held by the process that this runs in (`router.openai.template.worker`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED_CHARACTERS = 16 * 2**20
_MAX_POWER = 10**6
_SIZED = (str, list, tuple, bytes)
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0-9._^]*?(\d{5}|\*)")
# String methods whose result is as long as an argument says.
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


def _concat(pieces: Iterable[str]) -> str:
    """Joins what a template, a macro or a block printed."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        parts.append(piece)
    return "".join(parts)


class _Generator(CodeGenerator):
    """Compiles `a ~ b` so that the size is checked."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(str(part) for part in (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed and immutable; operators whose result can be far larger than their operands are checked first."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Generator
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "slice", "batch"):
            self.filters[name] = _bounded_filter(self.filters[name])
        self.filters["replace"] = _bounded_replace(self.filters["replace"])
        self.filters["join"] = _bounded_join(self.filters["join"])
        self.filters["format"] = _bounded_format(self.filters["format"])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and (_too_big(left) or _too_big(right) or abs(right) > 64):
            raise SecurityError("the power is too large")
        elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str) and _has_wide_percent(left):
            raise SecurityError("the format is too wide")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            if name in _PADDING and any(isinstance(size, int) and size > MAX_RENDERED_CHARACTERS for size in args):
                raise SecurityError("the padding is too wide")
            if name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            if name == "join" and args and isinstance(args[0], list | tuple):
                _check_size(sum(map(len, filter(_is_text, args[0]))) + len(owner) * len(args[0]))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _has_wide_braces(str(value.__self__)):
            raise SecurityError("the format is too wide")
        return wrapped


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; while serving it prints its content."""

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
    """A namespace that refuses names with a leading underscore."""

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
    if _has_wide_percent(format):
        raise SecurityError("the format is too wide")
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    if isinstance(indent, int) and indent > 100:
        raise SecurityError("the indentation is too wide")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARACTERS:
        raise SecurityError("the template makes a value that is too large")


def _check_product(left: Any, right: Any) -> None:
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, _SIZED) and isinstance(times, int):
            _check_size(len(sized) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise SecurityError("the product is too large")


def _too_big(value: Any) -> bool:
    return not isinstance(value, int | float) or abs(value) > _MAX_POWER


# A format may ask for a width; five digits and more, or a width from an argument, are refused.


def _has_wide_percent(format: str) -> bool:
    return _WIDE_PERCENT.search(format) is not None


def _has_wide_braces(format: str) -> bool:
    try:
        specs = [spec or "" for _, _, spec, _ in Formatter().parse(format)]
    except ValueError:  # the call itself will say what is wrong
        return False
    return any("{" in spec or re.search(r"\d{5}", spec) for spec in specs)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _check_replace(text: str | bytes, old: Any, new: Any) -> None:
    if isinstance(old, str | bytes) and isinstance(new, str | bytes) and len(new) > len(old):
        times = text.count(old) if old else len(text) + 1  # type: ignore[arg-type]
        _check_size(len(text) + times * (len(new) - len(old)))


def _bounded_filter(apply: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        for size in (*args, *kwargs.values()):
            if isinstance(size, int) and size > 10_000:
                raise SecurityError("the filter's width is too large")
        return apply(value, *args, **kwargs)

    return bounded


def _bounded_replace(apply: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _check_replace(str(s), old, new)
        return apply(eval_ctx, s, old, new, count)

    bounded.jinja_pass_arg = apply.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _bounded_join(apply: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        _check_size(len(d) * len(items) + sum(map(len, filter(_is_text, items))))
        return apply(eval_ctx, items, d, attribute)

    bounded.jinja_pass_arg = apply.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _bounded_format(apply: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_wide_percent(str(value)):
            raise SecurityError("the format is too wide")
        return apply(value, *args, **kwargs)

    return bounded
