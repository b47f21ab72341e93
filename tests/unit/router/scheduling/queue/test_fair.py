"""Keys take turns by the work that they have had; without keys the queue is one line."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
from support.factories import make_request

from router.scheduling.cache.blocks import FreeList
from router.scheduling.entry import Entry
from router.scheduling.queue.budget import Budget
from router.scheduling.queue.fair import FairLine, KeyWork
from router.scheduling.queue.request_queue import RequestQueue

PROMPT = 16


def entry_of(key: str, input_length: int = PROMPT, max_new_tokens: int = 1, **changes: float) -> Entry:
    return Entry(make_request("r", input_length, max_new_tokens, key=key, **changes))


class Line:
    def __init__(self, key_work: KeyWork | None = None) -> None:
        self.line = FairLine(key_work)
        self._next_id = 0

    def add(self, key: str, count: int = 1, **sizes: float) -> list[Entry]:
        entries = [entry_of(key, **sizes) for _ in range(count)]
        for entry in entries:
            entry.queued(self._next_id)
            self._next_id += 1
            self.line.append(entry)
        return entries

    def serve(self, count: int) -> str:
        """The keys of the next entries, which are charged for their prompts."""
        served = ""
        for _ in range(count):
            first, entry = self.line.first, self.line.popleft()
            assert first is entry
            self.line.charge(entry)
            served += entry.request.key
        return served


def test_keys_take_turns_and_each_is_in_order() -> None:
    line = Line()
    line.add("a", 4)
    line.add("b", 2)
    assert (line.serve(6), len(line.line)) == ("ababaa", 0)


def test_a_weight_is_a_share() -> None:
    line = Line()
    line.add("a", 9, weight=3.0)
    line.add("b", 9)
    assert Counter(line.serve(8)) == {"a": 6, "b": 2}


def test_tokens_count_and_not_requests() -> None:
    line = Line()
    line.add("a", 3, input_length=30)
    line.add("b", 9, input_length=10)
    assert Counter(line.serve(8)) == {"a": 2, "b": 6}


def test_generated_tokens_count_twice() -> None:
    line = Line()
    first, *_ = line.add("a", 3)
    line.add("b", 4)
    assert line.serve(2) == "ab"
    first.generated_ids += range(PROMPT)
    line.line.charge_generated()
    assert line.serve(4) == "bbab"


def test_idling_saves_nothing_up() -> None:
    line = Line()
    line.add("a", 20)
    assert line.serve(10) == "a" * 10
    line.add("b", 10)
    assert line.serve(6) in ("ababab", "bababa")


def test_a_key_that_comes_to_an_empty_queue_begins_where_the_last_one_was() -> None:
    line = Line()
    line.add("a", 5)
    line.serve(5)
    line.add("b", 5)
    line.serve(1)
    line.add("a", 5)
    assert line.serve(4) in ("abab", "baba")


def test_the_lines_of_replicas_share_what_keys_have_had() -> None:
    work = KeyWork()
    one, other = Line(work), Line(work)
    one.add("a", 8)
    assert one.serve(4) == "aaaa"
    other.add("a", 4)
    other.add("b", 4)  # begins where a is
    assert other.serve(2) in ("ab", "ba")
    assert one.serve(2) == "aa"
    assert other.serve(3) == "bba"


def test_a_key_that_waits_at_another_replica_is_not_idle() -> None:
    work = KeyWork()
    one, other = Line(work), Line(work)
    one.add("a", 8)
    one.add("b", 8)
    one.line.charge(one.line.popleft())
    for _ in range(3):
        [entry] = other.add("a")
        other.line.popleft()
        other.line.charge(entry)
    other.add("a", 4)
    other.add("b", 4)
    assert other.serve(4) == "bbbb"


def test_the_line_of_a_replica_that_has_failed_is_forgotten() -> None:
    work = KeyWork()
    one = Line(work)
    one.add("a", 3)
    one.serve(1)
    failed = Line(work)
    failed.add("b", 1)
    assert work.waiting == {"a", "b"}
    del failed
    gc.collect()
    assert work.waiting == {"a"}


def test_what_is_put_back_is_not_charged_and_stays_first() -> None:
    line = Line()
    first, _ = line.add("a", 2)
    line.add("b", 2)
    for _ in range(5):
        assert line.line.popleft() is first
        line.line.charge(first)
        line.line.appendleft(first)
    assert line.serve(4) == "abab"


def test_the_lowest_priority_is_next_and_keys_take_turns_in_it() -> None:
    line = Line()
    line.add("a", 2, priority=1)
    line.add("b", 3)
    line.add("a", 2, priority=-1)
    line.add("c", 2)
    line.add("b", 1, priority=-1)
    assert dict(line.line.sizes()) == {"a": 4, "b": 4, "c": 2}
    order = [entry.request.priority for entry in line.line]
    assert order == sorted(order)
    assert line.serve(10) == "ab" + "a" + "c" + "bcbb" + "aa"


def test_a_key_that_waits_at_one_priority_is_not_lifted_at_another() -> None:
    line = Line()
    line.add("b", 3, input_length=100)
    line.add("a", 1, priority=5)
    assert line.serve(3) == "bbb"
    line.add("b", 1)
    line.add("a", 1)
    assert line.serve(1) == "a"


@pytest.mark.parametrize("seed", range(20))
def test_without_keys_it_is_a_deque(seed: int) -> None:
    chosen, line, expected = random.Random(seed), Line(), []
    for _ in range(300):
        action = chosen.choice(["append", "append", "pop", "back"])
        if action == "append":
            expected += line.add("")
        elif expected and action == "pop":
            taken = line.line.popleft()
            assert taken is expected.pop(0)
        elif expected:
            taken = line.line.popleft()
            line.line.appendleft(taken)
        assert list(line.line) == expected and len(line.line) == len(expected)


class Server:
    """A queue before a batch of few rows, and clients that send their next request when they have an answer."""

    def __init__(self, clients: str, *, has_keys: bool) -> None:
        self.generated: Counter[str] = Counter()
        self._queue = RequestQueue(block_size=1, allocator=FreeList(1 << 20, 1), chunking=True)
        self._has_keys = has_keys
        self._lengths = random.Random(1)
        self._owners: dict[int, str] = {}
        self._running: list[Entry] = []
        for client in clients:
            self._send(client)

    def run(self, num_steps: int, num_rows: int) -> None:
        for _ in range(num_steps):
            free = num_rows - len(self._running)
            batch = self._queue.next_batch(Budget(None, free, 1 << 16)) if free else None
            self._running += [] if batch is None else batch.entries
            for entry in list(self._running):
                entry.generated_ids.append(0)
                self.generated[self._owners[entry.request_id]] += 1
                if not entry.num_remaining:
                    self._running.remove(entry)
                    entry.drop()
                    self._send(self._owners[entry.request_id])

    def _send(self, client: str) -> None:
        entry = entry_of(client if self._has_keys else "", max_new_tokens=self._lengths.randint(16, 48))
        self._queue.append(entry)
        self._owners[entry.request_id] = client


def test_one_client_beside_sixty_four_of_another_key_keeps_its_share() -> None:
    """Its share: what it gets beside one client of the other key, when nothing waits."""
    generated = {}
    for name, clients, has_keys in (("share", "ab", True), ("fair", "a" * 64 + "b", True),
                                    ("in order", "a" * 64 + "b", False)):  # fmt: skip
        server = Server(clients, has_keys=has_keys)
        server.run(4000, num_rows=8)
        generated[name] = server.generated["b"]
        assert name == "share" or server.generated.total() == 8 * 4000, "no row is left free"
    assert generated["fair"] >= 0.8 * generated["share"]
    assert generated["in order"] < 0.2 * generated["share"], "else this shows nothing"
