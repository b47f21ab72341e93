"""Compiles grammars for the router: `python -m router.grammar.worker`, in 512 MiB and a timed fork, by JSON frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.closed_schema import close_objects
from router.grammar.listed import listed
from router.grammar.one_of import OVERLAP
from router.grammar.text_grammar import lark_of, lark_of_regex
from router.grammar.walk import walked
from wire.grammar import OF_CALLS, GrammarKind, compile_grammar
from wire.worker.forked import Forked, JobEndedError
from wire.worker.main import serve

MEMORY_LIMIT = 512 << 20
_CPU_LIMIT_S = 10
_LONGEST_FAULT = 300
_NOTHING_FITS = "NoExtensionBias"  # how llguidance calls it
_UNKNOWN = re.compile(r"Unimplemented keys: (\[[^\]]*\])")
_OF_OVERLAP = "oneOf constraints are not supported"
_REGEX_FAULT = re.compile(r"^error: (.*)$", re.MULTILINE)
_PLACE = re.compile(r"^at \d+\(\d+\): ")

_ANY_OBJECT = {"type": "object"}

_TOKENS = re.compile(r"(?<=[\[^,])\d+(?=[\d,]*(?:,\$END)?\]>)")
_END_ID = 256
_PLACEHOLDERS = range(257, 257 + 32)
"""Stand in for the special tokens that a grammar names by their ids in the model's vocabulary."""


class _Bytes:
    """A vocabulary of bytes, an end and placeholders."""

    eos_token_id = _END_ID
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *(b"<|%d|>" % one for one in _PLACEHOLDERS)]  # noqa: RUF012
    special_token_ids = [_END_ID, *_PLACEHOLDERS]  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def check(kind: GrammarKind, text: str, tokenizer: LLTokenizer, loose: Sequence[str] = ()) -> dict[str, str]:
    """Return `{"grammar": text}`, `{"fault": sentence}`, or both if `loose` schemas became any object."""
    found = _checked(kind, text, tokenizer)
    if "fault" in found and loose and (other := _loosened(text, tokenizer, loose)) is not None:
        return found | _checked(kind, other, tokenizer)
    return found


def _loosened(text: str, tokenizer: LLTokenizer, loose: Sequence[str]) -> str | None:
    """Replace schemas that do not compile alone by any object, if any."""
    asked = orjson.loads(text)
    has_changed = False
    for each in asked["grammars"]:
        if each["name"] in loose and "fault" in _checked("lark", listed("start: @x", {**each, "name": "x"}), tokenizer):
            each["json_schema"], has_changed = _ANY_OBJECT, True
    return orjson.dumps(asked).decode() if has_changed else None


def _checked(kind: GrammarKind, text: str, tokenizer: LLTokenizer) -> dict[str, str]:
    try:
        text = _closed(kind, text)
        matcher = compile_grammar(kind, _with_known_tokens(text) if kind == "lark" else text, tokenizer, [_END_ID])
        matcher = walked(matcher, seed=len(text))
    except RecursionError:
        return {"fault": "nested too deeply"}
    except MemoryError:
        return {"fault": "takes too much memory"}
    except (ValueError, TypeError) as error:  # orjson cannot write what is nested too deeply: TypeError
        return {"fault": _sentence(str(error))}
    return {"fault": _sentence(matcher.get_error())} if matcher.is_error() else {"grammar": text}


def _closed(kind: GrammarKind, text: str) -> str:
    """Close objects, and set the router's white space."""
    if kind == "json":
        schema = orjson.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema must be an object")
        return orjson.dumps(close_objects(schema)).decode()
    if kind == "lark":
        asked = orjson.loads(text)
        frame, *others = asked["grammars"]
        asked["grammars"] = [frame, *({"name": each["name"]} | _compilable(each) for each in others)]
        return orjson.dumps(asked).decode()
    return text


def _compilable(grammar: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar of the frame as llguidance reads it."""
    if "json_schema" in grammar:
        return {"json_schema": {**close_objects(grammar["json_schema"]), "x-guidance": OF_CALLS}}
    if "regex" in grammar:
        return {"lark_grammar": lark_of_regex(grammar["regex"])}
    return {"lark_grammar": lark_of(grammar["text_grammar"])}


def _with_known_tokens(text: str) -> str:
    """Replace the model's tokens in a frame by those of `_Bytes`."""
    frame, *others = orjson.loads(text)["grammars"]
    numbers: dict[str, int] = {}

    def renumbered(found: re.Match[str]) -> str:
        return str(_PLACEHOLDERS[0] + numbers.setdefault(found[0], len(numbers)))

    frame["lark_grammar"] = _TOKENS.sub(renumbered, frame["lark_grammar"])
    return orjson.dumps({"grammars": [frame, *others]}).decode()


def main() -> None:
    """Serve until the router closes the pipe."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    forked = Forked()

    def answer(asked: bytes, limit_s: float) -> bytes:
        kind, text, loose = orjson.loads(asked)
        try:
            return forked.run(lambda: orjson.dumps(check(kind, text, tokenizer, loose)), limit_s)
        except JobEndedError:
            return orjson.dumps({"fault": "it takes too much memory or time to compile"})

    serve(answer, memory_limit=MEMORY_LIMIT, cpu_limit_s=_CPU_LIMIT_S)


def _sentence(message: str) -> str:
    """Return a library's line without unseen places."""
    message = message.partition("<non-verbose/>")[0]
    if message.strip() == _NOTHING_FITS:
        return "no text fits it"
    if found := _UNKNOWN.search(message):
        names = ", ".join(f"`{name}`" for name in orjson.loads(found[1]))
        return f"{names} cannot be enforced"[:_LONGEST_FAULT]
    if _OF_OVERLAP in message:
        return OVERLAP
    if found := _REGEX_FAULT.search(message):
        message = found[1]
    message = _PLACE.sub("", message.partition("\n   1 |")[0])
    return " ".join(message.split())[:_LONGEST_FAULT] or "it cannot be compiled"


if __name__ == "__main__":
    main()
