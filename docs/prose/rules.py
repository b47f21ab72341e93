"""Words and phrases that make a stranger stop and think, each with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Rule(NamedTuple):
    pattern: str
    """A regular expression, after a word boundary. A blank also matches the end of a line."""
    advice: str
    bad: str
    """An example that only this rule finds."""
    good: str
    """The same in plain words, which no rule finds."""


_COUNTED = (
    "adapter|block|byte|core|error|file|GPU|layer|minute|prompt|rank|replica|request|row|second|shard|thread|token"
)

METAPHORS = (
    Rule(r"(?:the|a|each|every|other|two|three) rooms?\b", "name the process", "the room next to it", "the router"),
    Rule(
        r"(?:corridor|crowd|guest|kin|leash|twin)s?\b", "name the thing itself", "Llama and its kin", "Llama's family"
    ),
    Rule(r"(?:doors?|farewell|in the dress of)\b", "name the thing itself", "the way to the door", "the HTTP server"),
    Rule(
        r"(?:all|best|hundred|only|single|who) looks\b",
        "name the measurement",
        "best of all looks",
        "best of five runs",
    ),
    Rule(r"neighbours?\b", "the other rows, the next one", "neighbours in a batch", "other rows of a batch"),
    Rule(r"news of\b", "say what happens", "news of a child", "the exit of a child"),
    Rule(r"dear(?:er|est)?\b", "expensive", "a dear request", "an expensive request"),
)
ACTORS = (
    Rule(r"whoever\b", "name the actor", "whoever calls this", "the thread that calls this"),
    Rule(r"(?:any|every|no|some)body\b", "name the actor", "nobody waits", "no request waits"),
    Rule(
        r"who (?:asks|carries|goes|holds|leaves|left|reads|uses|waits)\b",
        "name the actor",
        "the log says who waits",
        "the log names the request that waits",
    ),
    Rule(
        r"(?:are|be|been|is|was|were) told\b", "say who sends or knows it", "the shard is told", "the shard receives it"
    ),
)
TERMS = (
    Rule(
        r"(?:caller|client|reader)s? (?:(?:that|who) )?(?:(?:are|has|have|is) )?(?:gone|leaves?|left)\b",
        "disconnect",
        "a client that left",
        "a client that disconnected",
    ),
    Rule(r"(?:died|dies|dying)\b", "exit, fail, be killed", "a shard dies", "a shard exits"),
    Rule(r"dead\b", "stale, exited, unreachable", "a dead socket", "a stale socket"),
    Rule(r"import circles?\b", "import cycle", "an import circle", "an import cycle"),
    Rule(r"(?<!model )cards?\b", "GPU", "on a card", "on a GPU"),
    Rule(r"time-outs?\b", "timeout", "a time-out", "a timeout"),
)
SENTENCES = (
    Rule(r"anew\b", "again, from the start", "compute it anew", "compute it again"),
    Rule(
        r"(?:hence|lest|thereof|therein|thence|whence|whereof)\b",
        "so, therefore",
        "hence a limit",
        "so there is a limit",
    ),
    Rule(
        r"(?:it|that|which) (?:are|is|was|were) no (?!fewer|less|longer|more)",
        "is not a",
        "a field that is no number",
        "a field that is not a number",
    ),
    Rule(
        r"(?:that|which) (?:are|is) (?-i:none)\b",
        "is not one, is invalid",
        "a regex that is none",
        "a regex that is invalid",
    ),
    Rule(r"in the place of\b", "instead of", "a link in the place of a file", "a link instead of a file"),
    Rule(r"for want of\b", "for lack of, without", "fail for want of memory", "fail for lack of memory"),
    Rule(r"for ever\b", "forever", "wait for ever", "wait forever"),
    Rule(
        r"(?:mend(?:ed|s)?|seldom|to be had|can be had)\b",
        "fix, rarely, available",
        "the leak is mended",
        "the leak is fixed",
    ),
    Rule(r"quick(?:er|est)\b", "faster, fastest", "the quickest server", "the fastest server"),
    Rule(r"tokenis\w*", "tokenize", "the text is tokenised", "the text is tokenized"),
    Rule(r"(?:go|goes|going|gone|went) on\b(?! (?:a|the)\b)", "continue", "the stream goes on", "the stream continues"),
    Rule(r"be it\b", "whether", "be it config or model", "whether config or model"),
    Rule(r"(?:stands?|stood)\b(?!-| (?:in )?for\b)", "be, be written", "what stands there", "what is written there"),
    Rule(r"lies?\b", "be, be stored", "where a model lies", "where a model is stored"),
    Rule(r"tells? (?:how|of|what|whether|which)\b", "say, show", "the page tells how", "the page says how"),
    Rule(
        r"(?:all|any\w*|every\w*|none|nothing) but\b",
        "except, only",
        "everything but its share",
        "everything except its share",
    ),
    Rule(
        r"nor (?:are|can|did|do|does|has|have|is|may|was|will)\b",
        "and ... not",
        "nor does it wait",
        "and it does not wait",
    ),
)
# Words that the glossary of CONTRIBUTING.md has replaced.
GONE = (
    Rule(r"lock-step\b", "the steps are numbered", "in lock-step mode", "with numbered calls"),
    Rule(r"padded mode\b", "rows are never padded", "a batch in padded mode", "a flattened batch"),
    Rule(r"(?:block|page) extensions?\b", "new blocks", "the block extensions of a call", "the new blocks of a call"),
    Rule(r"lora slots?\b", "adapter slots", "a free LoRA slot", "a free adapter slot"),
    Rule(r"KV pages?\b", "KV blocks", "the KV pages of a request", "the KV blocks of a request"),
)
PLURALS = (
    Rule(r"\w+\(s\)", "the plural that fits the number", "2 file(s)", "2 files"),
    Rule(rf"(?<![\d.,-])(?<!- )1 (?:weight )?(?:{_COUNTED})s\b", "the singular", "1 weight files", "1 weight file"),
)
RULES = (*METAPHORS, *ACTORS, *TERMS, *SENTENCES, *GONE, *PLURALS)

_PATTERNS = [(re.compile(r"\b" + rule.pattern.replace(" ", r"\s"), re.I), rule.advice) for rule in RULES]


class Finding(NamedTuple):
    offset: int
    """Characters before it in the text."""
    words: str
    advice: str


def findings(text: str) -> Iterator[Finding]:
    for pattern, advice in _PATTERNS:
        for found in pattern.finditer(text):
            yield Finding(found.start(), " ".join(found[0].split()), advice)
