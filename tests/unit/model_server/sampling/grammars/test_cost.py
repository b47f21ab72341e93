"""Grammars whose masks take too long: their requests fail, the steps of others continue."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.expensive_grammars import ambiguous

import wire.demo_model
from model_server.sampling.grammars import cost as grammar_cost
from model_server.sampling.grammars import masks
from model_server.sampling.grammars.cost import GivenUpError, GrammarCost, GuardedThread, SharedLexer
from model_server.sampling.grammars.masks import GrammarMasks, Grammars, GrammarState
from model_server.sampling.parameters import Grammar
from model_server.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
END = 2


def client(grammar: str) -> str:
    """A client's grammar as the router writes it."""
    return json.dumps(
        {"grammars": [{"name": "frame", "lark_grammar": "start: @x"}, {"name": "x", "lark_grammar": grammar}]}
    )


EXPENSIVE = client(ambiguous(100, "ab"))


def busy(seconds: float) -> Callable[[], str]:
    """Work that holds the interpreter for moments only, as llguidance's does."""

    def work() -> str:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2000)
        return "done"

    return work


class Endless:
    """A job that works until it is told that it is over, and the thread that it has worked in."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        while not self.is_over.is_set():
            busy(0.01)()

    def join(self) -> None:
        assert self.thread is not None
        self.thread.join()  # it may wait as long as other processes keep the machine busy


def test_what_takes_too_much_cpu_time_is_given_up() -> None:
    guard = GuardedThread()
    assert guard.run(busy(0.01), 60.0) == "done"
    endless = Endless()
    with pytest.raises(GivenUpError):
        guard.run(endless, 0.05)
    assert endless.thread is not None and endless.thread.is_alive() and endless.thread.native_id is not None
    # It runs now and then on a busy machine, too: where it takes the interpreter's lock, all others wait for it.
    assert os.sched_getscheduler(endless.thread.native_id) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, endless.thread.native_id) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    assert guard.run(busy(0.01), 60.0) == "done", "in another thread"
    endless.is_over.set()
    endless.join()


def test_a_job_that_ends_while_it_is_given_up_is_left_behind_too(monkeypatch: pytest.MonkeyPatch) -> None:
    endless, priority = Endless(), os.getpriority

    def ends(which: int, who: int) -> int:
        endless.is_over.set()
        for _ in range(20):  # in vain: it waits to be told to end
            if os.path.exists(f"/proc/self/task/{who}"):
                time.sleep(0.02)
        return priority(which, who)

    monkeypatch.setattr(os, "getpriority", ends)
    with pytest.raises(GivenUpError):
        GuardedThread().run(endless, 0.02)
    endless.join()


def test_waiting_is_no_cpu_time_and_errors_are_raised() -> None:
    guard = GuardedThread()
    guard.run(lambda: time.sleep(0.2), 0.05)

    def wrong() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        guard.run(wrong, 60.0)


def test_a_request_may_take_so_much_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cost, "FREE_S", 0.01)
    monkeypatch.setattr(grammar_cost, "MOST_S", 0.1)
    cost = GrammarCost(GuardedThread(), None, SharedLexer(), may_prove=True)
    for _ in range(8):
        assert cost.run(lambda: "cheap", "") == "cheap"
    assert cost.is_proven and not cost.is_over
    cost.doubt()
    assert not cost.is_proven
    assert cost.run(busy(0.06), "") == "done" and not cost.is_over
    assert cost.run(busy(0.08), "") == "done" and cost.is_over
    assert cost.run(lambda: "more", "") == ""


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(Path(wire.demo_model.__file__).parent)


def steps(tokenizer: Tokenizer, states: list[GrammarState], count: int) -> list[str | None]:
    """Masks and the first token that each allows; what has failed in the end."""
    width = tokenizer.vocab_size
    for _ in range(count):
        going = [state for state in states if state.error is None]
        if not going:
            break
        logits = torch.zeros(len(going), width)
        GrammarMasks(slice(0, len(going)), going, CPU).apply(logits)
        for state, row in zip(going, logits, strict=True):
            if state.error is None:
                [state.advance(one) for one in (row == 0).nonzero().flatten().tolist()[-1:]]
    return [state.error for state in states]


def test_a_mask_that_is_too_expensive_ends_its_request_and_no_other(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(demo, demo.vocab_size)
    asked = [Grammar("lark", EXPENSIVE), Grammar("regex", "[ab]{100}"), Grammar("lark", EXPENSIVE)]
    monkeypatch.setattr(masks, "JOB_S", 0.01)
    errors = steps(demo, [grammars.start(one) for one in asked], 40)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert error is not None and error.startswith("the grammar takes too much time for each token: ")


def test_requests_with_the_grammar_of_a_thread_that_was_given_up_fail_without_waiting(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread holds the lexer that all of them share, as long as it works."""
    grammars = Grammars(demo, demo.vocab_size)
    asked = Grammar("lark", EXPENSIVE)
    first, second, other = grammars.start(asked), grammars.start(asked), grammars.start(Grammar("regex", "[ab]{9}"))
    monkeypatch.setattr(masks, "JOB_S", 0.01)
    assert steps(demo, [first], 1) != [None]
    run = GuardedThread.run
    monkeypatch.setattr(GuardedThread, "run", lambda *_: pytest.fail("waits for the thread"))
    assert second.forced() == [] and second.possible([5]) == []
    second.rewind(0)
    second.advance(5)
    assert steps(demo, [second, other], 2)[0] == first.error is not None
    assert other.error is None
    monkeypatch.setattr(GuardedThread, "run", run)
    monkeypatch.setattr(masks, "JOB_S", 60.0)
    assert grammars.compiled(asked).lexer is not first.cost._lexer  # type: ignore[union-attr]


def test_so_many_threads_are_left_behind(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then grammars of clients fail, and large schemas are served."""
    grammars = Grammars(demo, demo.vocab_size)
    large = Grammar("json", json.dumps({"enum": [f"value {number}" for number in range(2000)]}))
    states = [
        grammars.start(one) for one in (Grammar("lark", EXPENSIVE), Grammar("lark", client("start: /[ab]+/")), large)
    ]
    monkeypatch.setattr(grammar_cost, "MOST_LEFT_BEHIND", 0)
    errors = steps(demo, states, 2)
    assert errors[0] == errors[1] is not None and errors[1].startswith("the server still works on grammars of other")
    assert errors[2] is None
    monkeypatch.undo()
    monkeypatch.setattr(grammar_cost, "MOST_LEFT_BEHIND", 0)
    trigger = json.dumps({"texts": ["a"]})
    asleep = grammars.start(Grammar("lark", f'{{"trigger": {trigger}, {client("start: /[ab]+/")[1:]}'))
    [asleep.advance(one) for one in demo.encode("a", truncate=0, add_special_tokens=False)]
    assert asleep.is_crowded_out and asleep.error == errors[1], "what asks beside the masks leaves none behind, either"
    monkeypatch.undo()
    guard = GuardedThread()
    is_over = threading.Event()
    for number in range(grammar_cost.MOST_LEFT_BEHIND):
        assert not guard.is_crowded, number
        with pytest.raises(GivenUpError):
            guard.run(lambda: [busy(0.01)() for _ in iter(is_over.is_set, True)], 0.01)
    assert guard.is_crowded
    is_over.set()
    while guard.is_crowded:
        time.sleep(0.01)


def test_all_ranks_fail_the_same_rows(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that any of them cannot make in time; the others are told of it at the end of the masks."""
    said: list[int] = []

    def agree(value: int) -> int:
        """With another rank, which found the second row of three too expensive."""
        said.append(value)
        return min(value, [1, 3, 1, 3][len(said) - 1]) if len(said) <= 4 else value

    grammars = Grammars(demo, demo.vocab_size, agree)
    states = [grammars.start(Grammar("lark", client("start: /[ab]+/"))) for _ in range(3)]
    assert [error is None for error in steps(demo, states, 3)] == [True, False, True]
    assert said == [3, 3, 3, 3, 3, 3]


Answers = tuple[list[int], int, bool, list[str | None]]


def on_two_ranks(demo: Tokenizer, hindered: set[GuardedThread]) -> list[Answers]:
    """What two requests with one grammar answer on either rank behind a mask of the first, with the first rank's guard
    among those that are `hindered`.
    """
    barrier = threading.Barrier(2, timeout=60)
    said = [0, 0]

    def rank(number: int) -> Answers:
        def agree(value: int) -> int:
            said[number] = value
            barrier.wait()
            least = min(said)
            barrier.wait()
            return least

        grammars = Grammars(demo, demo.vocab_size, agree)
        first, second = [grammars.start(Grammar("lark", client("start: /[ab]+/"))) for _ in range(2)]
        if number == 0:
            hindered.add(grammars._guard)
        logits = torch.zeros(2, demo.vocab_size)
        GrammarMasks(slice(0, 1), [first], CPU).apply(logits)
        fits = demo.encode("a", truncate=0, add_special_tokens=False)
        answers = second.forced(), len(second.possible(fits)), second.try_next(fits[0])
        second.rewind(1)
        GrammarMasks(slice(0, 2), [first, second], CPU).apply(logits)
        return *answers, [first.error, second.error]

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(rank, range(2)))


def test_a_lexer_is_taken_on_all_ranks(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are of one length on all of them, and no rank waits for the thread that was given up on one."""

    run, slow = GuardedThread.run, set[GuardedThread]()

    def run_or_give_up(guard: GuardedThread, work: Callable[[], object], limit_s: float) -> object:
        if guard in slow:
            raise GivenUpError
        return run(guard, work, limit_s)

    monkeypatch.setattr(GuardedThread, "run", run_or_give_up)
    found = on_two_ranks(demo, slow)
    assert found[0] == found[1]
    assert found[0][:3] == ([], 0, False)
    assert all(error is not None and error.startswith("the grammar takes too much") for error in found[0][3])


def test_all_ranks_say_that_a_request_is_crowded_out(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = set[GuardedThread]()
    monkeypatch.setattr(GuardedThread, "is_crowded", property(lambda guard: guard in crowded))
    found = on_two_ranks(demo, crowded)
    assert found[0] == found[1]
    assert found[0][1:3] == (1, True)
    assert found[0][3][0] is not None and found[0][3][0].startswith("the server still works on grammars of other")


def test_only_what_may_be_expensive_is_measured(demo: Tokenizer) -> None:
    grammars = Grammars(demo, demo.vocab_size)
    assert grammars.start(Grammar("json", "{}")).cost is None
    large = json.dumps({"enum": [f"value {number}" for number in range(2000)]})
    cost = grammars.start(Grammar("json", large)).cost
    assert cost is not None and cost.may_prove
    cost = grammars.start(Grammar("lark", EXPENSIVE)).cost
    assert cost is not None and not cost.may_prove
    schemas = {"grammars": [{"name": "frame", "lark_grammar": "start: @x"}, {"name": "x", "json_schema": {}}]}
    assert grammars.start(Grammar("lark", json.dumps(schemas))).cost is None
