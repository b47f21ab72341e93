"""Compiled grammars that are kept for the next request with the same text, bounded in bytes."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict

from llguidance import LLMatcher

from model_server.sampling.grammars.cost import SharedLexer
from model_server.sampling.parameters import Grammar

MOST_BYTES = 256 << 20

# TGI's number.
_MOST_GRAMMARS = 32

# What llguidance takes to compile a text was 14 to 280 bytes for each of its characters.
_BYTES = 64 << 10
_BYTES_PER_CHARACTER = 300


class KeptGrammar:
    """A grammar's automaton at its start, and the bytes that it takes with its lexer."""

    def __init__(self, matcher: LLMatcher, num_characters: int) -> None:
        """Measure nothing yet: the size follows from the text."""
        self.matcher = matcher
        self.lexer = SharedLexer()
        self.num_bytes = _BYTES + _BYTES_PER_CHARACTER * num_characters


class GrammarCache:
    """The grammars that were used last; may be called from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Begin without grammars."""
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Grammar, KeptGrammar] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, grammar: Grammar) -> KeptGrammar | None:
        """Return what is kept of a grammar, which is then the last one used."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is None:
                return None
            if kept.lexer.is_taken:
                del self._kept[grammar]  # it may be for long
                return None
            self._kept.move_to_end(grammar)
            return kept

    def add(self, grammar: Grammar, matcher: LLMatcher) -> KeptGrammar:
        """Keep a grammar, and return it or the equal one that came first."""
        with self._lock:
            kept = self._kept.setdefault(grammar, KeptGrammar(matcher, len(grammar.text)))
            self._trim()
            return kept

    def grew(self, kept: KeptGrammar, num_bytes: int, has_failed: bool) -> None:
        """Charge memory to a grammar in use, whose lexer all its requests share; drop it behind a failure.

        A lexer has room for so many states: full of those of earlier requests it would fail every later one.
        """
        if num_bytes <= 0 and not has_failed:
            return
        with self._lock:
            kept.num_bytes += max(num_bytes, 0)
            self._trim()
            for grammar in [one for one, other in self._kept.items() if has_failed and other is kept]:
                del self._kept[grammar]

    def _trim(self) -> None:
        num_bytes = self.num_bytes
        while len(self._kept) > _MOST_GRAMMARS or num_bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            num_bytes -= oldest.num_bytes


class _Heap(ctypes.Structure):
    """The `mallinfo2` of glibc."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def _mallinfo() -> ctypes._NamedFuncPointer | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Heap
    return found


_MALLINFO = _mallinfo()


def heap_bytes() -> int:
    """Return the bytes of this process's heap that are in use; 0 where the C library does not say."""
    if _MALLINFO is None:
        return 0
    sizes = _MALLINFO().sizes
    return int(sizes[4] + sizes[7])  # mapped, and in arenas
