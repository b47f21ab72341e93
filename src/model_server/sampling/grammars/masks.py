"""Requests whose text must match a schema or regex, by llguidance's automata.

The sampled token moves the automaton on the host, so a step's mask waits for the token before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Backend
from torch import Tensor

from model_server.errors import GrammarError
from model_server.memory.transfer import upload
from model_server.sampling.grammars.cache import GrammarCache, KeptGrammar, heap_bytes
from model_server.sampling.grammars.cost import FREE_S, JOB_S, SLOW_S, STEP_S, Agree, GrammarCost, GuardedThread
from model_server.sampling.parameters import Grammar
from model_server.text.tokenizer import Tokenizer
from model_server.text.watch import TextWatch
from wire.grammar import TextTrigger, compile_grammar, is_by_client, may_be_expensive, trigger_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_THREADS = 8
_WORD_BITS = 32
_LONGEST_REASON = 300
_NO_FIT = "doesn't satisfy the grammar"  # how llguidance calls it
# The highest values that the tokens of one byte of a mask may have: what is allowed is not bounded.
_BOUNDS: npt.NDArray[np.float32] = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
_TOO_EXPENSIVE = "the grammar takes too much time for each token: name fewer alternatives, or make it unambiguous"
_CROWDED_OUT = "the server still works on grammars of other requests that take too much time: try again later"
_MADE_UP_EOS = "<|made up for grammars: the end|>"


class GrammarState:
    """One request's position in its grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: frozenset[int],
        made_up_eos: int | None,
        executor: LLExecutor,
        num_words: int,
        trigger: int | TextWatch | None = None,
        cost: GrammarCost | None = None,
        grew: Callable[[int, bool], None] | None = None,
    ) -> None:
        """Start at a matcher.

        Args:
            eos_token_ids: Empty without one; then `made_up_eos` replaces it, and is never sampled.
            num_words: Width of a mask.
            trigger: Until it comes any token may, and the state is asleep.
            cost: If it may be expensive.
        """
        self.cost = cost
        self.matcher = matcher
        self.grew = grew
        self.made_up_eos = made_up_eos
        self.executor = executor
        self.num_words = num_words
        # Nothing can follow any more, not even an end token.
        self.is_over = False
        self._eos_token_ids = eos_token_ids
        self._trigger = trigger

    @property
    def is_asleep(self) -> bool:
        """Whether any token may follow."""
        return self._trigger is not None

    @property
    def is_crowded_out(self) -> bool:
        """Whether it failed since other requests take too much."""
        return self.cost is not None and self.cost.is_over and self.cost.is_crowded_out

    @property
    def has_failed(self) -> bool:
        """Whether the automaton itself cannot continue."""
        return (self.cost is None or self.cost.may_ask) and self.matcher.is_error()

    @property
    def error(self) -> str | None:
        """Say why the automaton cannot continue, if so."""
        if self.cost is not None and self.cost.is_over:
            return _CROWDED_OUT if self.is_crowded_out else _TOO_EXPENSIVE
        return _failure(self.matcher) if self.matcher.is_error() else None

    def forced(self) -> list[int]:
        """Return tokens that must follow."""
        return [] if self.is_asleep else self._run(self.matcher.compute_ff_tokens, [])

    def possible(self, token_ids: list[int]) -> list[int]:
        """Return the beginning of these tokens that may follow; while asleep, before the trigger."""
        if isinstance(self._trigger, TextWatch):
            return self._trigger.before_trigger(token_ids)
        if self._trigger is not None:
            return token_ids[: token_ids.index(self._trigger)] if self._trigger in token_ids else token_ids
        return token_ids[: self._run(lambda: self.matcher.validate_tokens(token_ids), 0)]

    def try_next(self, token_id: int) -> bool:
        """Take a `possible` token tentatively; return whether another may follow."""
        if self.is_asleep:
            return True
        return self._run(lambda: self.matcher.consume_token(token_id) and not self.matcher.is_stopped(), False)

    def rewind(self, num_tokens: int) -> None:
        """Give back tokens of `try_next`."""
        if not self.is_asleep and (self.cost is None or self.cost.may_ask):
            self.matcher.rollback(num_tokens)

    def advance(self, token_id: int) -> None:
        """Take the sampled token.

        Raises:
            GrammarError: The automaton cannot continue.
        """
        token_ids = [token_id]
        if isinstance(self._trigger, TextWatch):
            token_ids = self._trigger.add(token_id)
            if not token_ids:
                return
            num_fit = self._run(lambda: self.matcher.validate_tokens(token_ids), 0)
            if num_fit < len(token_ids) and (self.cost is None or self.cost.may_ask):
                return  # what came with the text does not fit: and begins no call
        elif self._trigger not in (None, token_id):
            return
        self._trigger = None  # the automaton need not know what came before
        # One at a time: behind drafts that were taken and given back `consume_tokens` fails where this does not.
        fits = self._run(lambda: all(self.matcher.consume_token(one) for one in token_ids), True)
        if self.cost is not None and not self.cost.may_ask:
            return  # as the next mask says
        if not fits:
            if self.grew is not None:
                self.grew(0, self.has_failed)
            raise GrammarError(_failure(self.matcher))
        if self.matcher.is_stopped():
            self.is_over = not self._eos_token_ids or token_id in self._eos_token_ids

    def mask(self, into: npt.NDArray[np.uint32], limit_s: float = JOB_S) -> None:
        """Write what may follow, a bit per token; nothing beyond the time limit."""
        row_bytes = self.num_words * into.itemsize
        if self.cost is None or self.cost.is_proven:
            self.matcher.unsafe_compute_mask_ptr(into.ctypes.data, row_bytes)
            return
        own = np.zeros_like(into)  # written to even after the automaton was given up
        self.cost.run_for_mask(lambda: self.matcher.unsafe_compute_mask_ptr(own.ctypes.data, row_bytes), limit_s)
        into[:] = own

    def _run(self, work: Callable[[], T], default: T) -> T:
        if self.cost is None or (self.cost.may_prove and self.cost.may_ask):
            return work()
        return self.cost.run(work, default)


class Grammars:
    """Compiles grammars, on any thread; reads the tokenizer on first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, agree: Agree | None = None) -> None:
        """Take the width of logits, and how ranks `agree`, if there are several."""
        self._tokenizer = tokenizer
        self._agree = agree
        self._guard = GuardedThread()
        self._width = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = frozenset(i for i in tokenizer.eos_token_ids if 0 <= i < vocab_size)
        self._made_up_eos: int | None = None
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._lock = threading.Lock()
        self.cache = GrammarCache()

    def start(self, grammar: Grammar) -> GrammarState:
        """Return a request's state, if its grammar is valid."""
        kept = self.compiled(grammar)
        if kept.matcher.is_error():
            raise GrammarError(_refusal(_reason(kept.matcher)))
        assert self._executor is not None and self._vocabulary is not None
        trigger = trigger_of(grammar.kind, grammar.text)
        watched = TextWatch(trigger, self._vocabulary) if isinstance(trigger, TextTrigger) else trigger
        num_words = -(-self._width // _WORD_BITS)
        cost = None
        if may_be_expensive(grammar.kind, grammar.text):
            may_prove = not is_by_client(grammar.kind, grammar.text)
            cost = GrammarCost(self._guard, self._agree, kept.lexer, may_prove=may_prove)
        grew = partial(self.cache.grew, kept)
        return GrammarState(
            kept.matcher.deep_copy(), self._eos_token_ids, self._made_up_eos, self._executor, num_words, watched, cost,
            grew,
        )  # fmt: skip

    def compiled(self, grammar: Grammar) -> KeptGrammar:
        """Return the unchanged automaton, perhaps in an error state.

        Raises:
            GrammarError: The text is not JSON, or the tokenizer has no masks.
        """
        with self._lock:
            known = self.cache.get(grammar)
            if known is not None:
                return known
            vocabulary = self._load()
        try:
            ends = self._eos_token_ids or {self._made_up_eos or 0}
            matcher = compile_grammar(grammar.kind, grammar.text, vocabulary, sorted(ends))
        except ValueError as error:
            raise GrammarError(_refusal(str(error))) from None
        return self.cache.add(grammar, matcher)

    def _load(self) -> LLTokenizer:
        if self._vocabulary is None:
            source, eos = self._tokenizer.to_json(), sorted(self._eos_token_ids)
            if not eos:
                source, self._made_up_eos = _with_made_up_eos(source)
                eos = [self._made_up_eos]
                self._width = max(self._width, self._made_up_eos + 1)
            try:
                self._vocabulary = LLTokenizer(source, n_vocab=self._width, eos_token=eos)
            except ValueError as error:
                raise GrammarError(f"grammars are not supported with this model's tokenizer: {error}") from None
            self._executor = LLExecutor(min(_MOST_THREADS, torch.get_num_threads()))
        return self._vocabulary


class GrammarMasks:
    """Masks the logits of rows with a grammar."""

    def __init__(self, rows: Tensor | slice, states: Sequence[GrammarState], device: torch.device) -> None:
        """Take logits rows [n] int64 in the order of `states`."""
        self._rows = rows
        self._states = states
        self._device = device
        self._bits = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def apply(self, logits: Tensor) -> None:
        """Mask float32 [num_rows, vocab] in place; failed automata lose all candidates."""
        awake = [place for place, state in enumerate(self._states) if not state.is_asleep]
        if len(awake) < len(self._states):
            if awake:
                states = [self._states[place] for place in awake]
                GrammarMasks(self._rows_at(awake), states, self._device).apply(logits)
            return
        allowed = self._allowed()
        if logits.device.type == "cpu":
            self._mask_on_host(logits, allowed.view(np.uint8))
            return
        blocked = self._blocked(allowed, logits)
        if isinstance(self._rows, slice):
            logits[self._rows].masked_fill_(blocked, -torch.inf)
        else:
            logits[self._rows] = logits[self._rows].masked_fill_(blocked, -torch.inf)

    def _rows_at(self, places: list[int]) -> Tensor:
        if isinstance(self._rows, slice):
            return upload(torch.tensor(places) + self._rows.start, self._device)
        return self._rows[upload(torch.tensor(places), self._device)]

    def _allowed(self) -> npt.NDArray[np.uint32]:
        """Return what may follow, [n, num_words], the lowest bit first."""
        words = np.zeros((len(self._states), self._states[0].num_words), np.uint32)
        before = heap_bytes()
        costs = {place: state.cost for place, state in enumerate(self._states) if state.cost is not None}
        if costs:
            self._compute_measured(costs, words)
            GrammarCost.finalize(list(costs.values()))
        else:
            self._compute(range(len(self._states)), words)
        grown = (heap_bytes() - before) // len(self._states)
        for state, row in zip(self._states, words, strict=True):
            if state.grew is not None:
                state.grew(grown, state.has_failed)
            if state.error is not None:
                row[:] = 0
        made_up = self._states[0].made_up_eos
        if made_up is not None:
            word, bit = divmod(made_up, _WORD_BITS)
            words[:, word] &= ~np.uint32(1 << bit)
        return words

    def _compute(self, places: Sequence[int], words: npt.NDArray[np.uint32]) -> None:
        """Compute some rows' masks at once."""
        if len(places) == 1:
            self._states[places[0]].mask(words[places[0]])
        elif places:
            matchers = [(self._states[place].matcher, place) for place in places]
            row_bytes = words.shape[1] * words.itemsize
            self._states[0].executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, row_bytes, len(words))

    def _compute_measured(self, costs: Mapping[int, GrammarCost], words: npt.NDArray[np.uint32]) -> None:
        """Compute expensive masks one by one, until proven cheap."""
        alone = [place for place, cost in costs.items() if not cost.is_proven]
        began = perf_counter()
        self._compute([place for place in range(len(self._states)) if place not in alone], words)
        if perf_counter() - began > SLOW_S:
            for cost in costs.values():
                cost.doubt()
        spent = 0.0
        for place in alone:
            self._states[place].mask(words[place], JOB_S if spent < STEP_S else FREE_S)
            spent += costs[place].last_s

    def _mask_on_host(self, logits: Tensor, allowed: npt.NDArray[np.uint8]) -> None:
        """Mask row by row on the host, keeping NaN."""
        # A bound stays in the CPU's cache: twenty times as fast as torch's masked fill with its branches.
        rows = range(*self._rows.indices(len(logits))) if isinstance(self._rows, slice) else self._rows.tolist()
        bound = np.empty((allowed.shape[1], 8), np.float32)
        highest = torch.from_numpy(bound).flatten()[: logits.shape[1]]
        for row, bits in zip(rows, allowed, strict=True):
            np.take(_BOUNDS, bits, axis=0, out=bound, mode="clip")
            torch.minimum(logits[row], highest, out=logits[row])

    def _blocked(self, allowed: npt.NDArray[np.uint32], logits: Tensor) -> Tensor:
        """Return what may not follow, [n, vocab_size] bool on the device."""
        packed = upload(torch.from_numpy((~allowed).view(np.uint8)), logits.device)
        return (packed[:, :, None] & self._bits).flatten(1)[:, : logits.shape[1]].bool()


def _with_made_up_eos(tokenizer_json: str) -> tuple[str, int]:
    """Add the end token that llguidance needs."""
    backend = Backend.from_str(tokenizer_json)
    backend.add_special_tokens([_MADE_UP_EOS])
    text: str = backend.to_str()
    return text, max(backend.get_vocab(with_added_tokens=True).values())


def _refusal(reason: str) -> str:
    """Say that a grammar does not compile; why, to the log: the router has explained what it can see."""
    logger.warning("a grammar does not compile: %s", reason)
    return "grammar is not valid: it is malformed, or too large for this model's vocabulary"


def _failure(matcher: LLMatcher) -> str:
    """Say why a grammar cannot continue, in our words."""
    reason = _reason(matcher)
    logger.debug("a grammar failed: %s", reason)
    if _NO_FIT in reason:
        return "the grammar failed: a token does not fit it"
    return "the grammar failed: it grows too large; name fewer alternatives, or bound its repetitions lower"


def _reason(matcher: LLMatcher) -> str:
    """One line of what llguidance says."""
    said = matcher.get_error().partition("<")[0]
    return " ".join(said.split())[:_LONGEST_REASON]
