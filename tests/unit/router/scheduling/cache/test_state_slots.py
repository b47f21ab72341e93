"""Slots of states: no request without one, prompts continue from the nearest saved state, and nothing is lost.

A simulated memory remembers which tokens the state in each slot has seen, and which each block holds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from support.effort import examples

from router.scheduling.cache.blocks import Allocation, BlockAllocator, FreeList
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.cache.states import Kind, StateSlots

SIZE = 16


@dataclass
class Memory:
    """What the shards hold behind the router's numbers; `computed` counts prompt tokens."""

    cache: BlockAllocator
    states: dict[int, list[int]] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0

    def start(
        self, prompt: list[int], more: int = 8, namespace: str = "", resumed: int = 0, answer_start: int = 0
    ) -> Allocation | None:
        """Allocate, and do what the first forward does before it computes.

        Args:
            resumed: Tokens at the end of `prompt` that were generated before a preemption.
        """
        num_prompt = len(prompt) - resumed
        found = self.cache.allocate(
            len(prompt) + more, prompt, namespace, num_prompt=num_prompt, answer_start=answer_start
        )
        if found is None:
            return None
        state = found.state
        assert state is not None and found.prefix_length < len(prompt)
        before = prompt[: found.prefix_length]
        assert (state.restored_from is None) == (not before)
        if state.restored_from is not None:
            assert self.states[state.restored_from] == before
        for number in range(found.prefix_length // SIZE):
            assert self.blocks[found.blocks[number]] == prompt[: (number + 1) * SIZE]
        self.states[state.slot] = before
        return found

    def prefill(self, found: Allocation, prompt: list[int]) -> None:
        """Compute the whole prompt, save states on the way, and share what was computed."""
        assert found.state is not None
        self.computed += len(prompt) - found.prefix_length
        for number in range(found.prefix_length // SIZE, len(found.blocks)):
            self.blocks[found.blocks[number]] = prompt[: (number + 1) * SIZE]
        for save in found.state.saves:
            assert found.prefix_length < save.position <= found.state.num_prompt and not save.position % SIZE
            self.states[save.slot] = prompt[: save.position]
        self.states[found.state.slot] = prompt
        self.cache.commit(found, prompt)

    def run(self, prompt: list[int], more: int = 8, answer_start: int = 0) -> int:
        """Run one request to its end; return what it did not compute."""
        found = self.start(prompt, more, answer_start=answer_start)
        assert found is not None
        skipped = found.prefix_length
        self.prefill(found, prompt)
        self.cache.free(found, [*prompt, *[7] * more])
        return skipped


def memory(num_slots: int, num_blocks: int = 400) -> Memory:
    return Memory(PrefixCache(num_blocks, SIZE, StateSlots(num_slots, SIZE)))


def slots_of(cache: BlockAllocator) -> StateSlots:
    assert cache.states is not None
    return cache.states


def chat(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("kind", [FreeList, PrefixCache])
def test_no_more_requests_run_than_have_slots(kind: type[FreeList | PrefixCache]) -> None:
    cache = kind(100, SIZE, StateSlots(3, SIZE))
    running = [cache.allocate(20, [i] * 20 if i else None) for i in range(3)]
    assert sorted(one.state.slot for one in running if one and one.state) == [1, 2, 3]
    version, free = cache.version, cache.num_free
    assert cache.allocate(20, [9] * 20) is None and cache.num_free == free
    assert running[1] is not None
    cache.free(running[1])
    cache.free(running[1])
    assert cache.version > version and slots_of(cache).num_free == 1
    assert cache.allocate(20, [9] * 20) is not None


def test_a_second_turn_computes_little_more_than_its_own_tokens() -> None:
    chance, found = random.Random(0), memory(8)
    first = chat(chance, 900)
    assert found.run(first) == 0
    second = [*first, *chat(chance, 60)]
    assert len(second) - found.run(second) <= 60 + 8 + SIZE
    # A prompt that differs in its last tokens, as where a template drops what opened the answer.
    third = [*second[:-8], *chat(chance, 60)]
    assert len(third) - found.run(third) <= 60 + 8 + SIZE
    assert slots_of(found.cache).counts.restored == 2


def test_what_many_prompts_begin_with_is_saved_by_the_second() -> None:
    chance, found = random.Random(1), memory(8)
    system = chat(chance, 500)
    skipped = [found.run([*system, *chat(chance, 50)]) for _ in range(3)]
    assert skipped == [0, 0, 496]
    counts = slots_of(found.cache).counts
    assert (counts.saved, counts.restored, counts.recomputed) == (4, 1, 496)


def kinds_of(found: Memory) -> list[Kind]:
    return sorted(Kind(one.kind) for one in slots_of(found.cache)._checkpoints)


def test_an_end_that_was_left_behind_goes_first_and_a_junction_last() -> None:
    chance, found = random.Random(2), memory(6)
    system = chat(chance, 200)
    found.run([*system, *chat(chance, 50)])
    first = [*system, *chat(chance, 90)]
    found.run(first)  # saves the junction
    assert found.run([*system, *chat(chance, 50)]) == 192
    found.run([*first, *chat(chance, 100)])
    assert kinds_of(found) == [Kind.JUNCTION, Kind.END, Kind.END, Kind.END, Kind.SUPERSEDED]
    running = [found.start(chat(chance, 10)) for _ in range(2)]
    assert kinds_of(found) == [Kind.JUNCTION, Kind.END, Kind.END, Kind.END]
    running += [found.start(chat(chance, 10)) for _ in range(3)]
    assert all(running) and kinds_of(found) == [Kind.JUNCTION]


def test_a_place_where_one_prompt_parted_is_no_safer_than_an_end() -> None:
    chance, found = random.Random(6), memory(4)
    system = chat(chance, 200)
    for _ in range(2):
        found.run([*system, *chat(chance, 50)])
    assert kinds_of(found) == [Kind.JUNCTION, Kind.END, Kind.END]
    running = [found.start(chat(chance, 10)) for _ in range(3)]
    assert all(running) and kinds_of(found) == [Kind.END]  # what was saved last


def test_a_prompt_that_only_goes_on_has_no_junction() -> None:
    chance, found = random.Random(7), memory(4)
    prompt = chat(chance, 300)
    found.run(prompt)
    slots_of(found.cache).drop(next(iter(slots_of(found.cache)._checkpoints)))
    assert found.run([*prompt, *chat(chance, 50)]) == 0  # blocks are known, and no state
    assert kinds_of(found) == [Kind.END]


def test_a_chat_continues_from_its_last_user_message_where_what_was_thought_is_left_out() -> None:
    chance, found = random.Random(8), memory(3)
    asked = chat(chance, 300)
    prompt = asked
    for _ in range(4):  # calls of tools, which the next turn has otherwise
        found.run(prompt, answer_start=len(asked))
        prompt = [*prompt, *chat(chance, 100)]
    assert kinds_of(found) == [Kind.USER, Kind.END]  # the superseded ones made room
    second = [*asked, *chat(chance, 200)]
    assert found.run(second, answer_start=len(second)) == 288
    assert Kind.USER in kinds_of(found) and kinds_of(found).count(Kind.USER) == 1


def test_another_user_message_leaves_the_one_before_behind() -> None:
    chance, found = random.Random(9), memory(9)
    prompt = chat(chance, 100)
    for _ in range(3):
        found.run(prompt, answer_start=len(prompt))
        prompt = [*prompt, *chat(chance, 100)]
    assert kinds_of(found) == [Kind.USER, Kind.SUPERSEDED, Kind.SUPERSEDED]


def test_a_request_gets_the_slot_of_the_state_that_it_continues_from_if_there_is_no_other() -> None:
    chance, found = random.Random(3), memory(2)
    first = chat(chance, 100)
    found.run(first)
    other = found.start(chat(chance, 10))
    assert other is not None and slots_of(found.cache).num_checkpoints == 1
    second = found.start([*first, *chat(chance, 20)])
    assert second is not None and second.state is not None and second.prefix_length == 80
    assert second.state.restored_from == second.state.slot and slots_of(found.cache).num_checkpoints == 0
    assert found.start(chat(chance, 10)) is None


def test_a_checkpoint_goes_with_its_last_block() -> None:
    chance, found = random.Random(4), memory(4, num_blocks=12)
    found.run(chat(chance, 100))
    states = slots_of(found.cache)
    assert (states.num_checkpoints, states.num_free) == (1, 3)
    assert found.start(chat(chance, 100), more=60) is not None  # takes all but one block
    assert (states.num_checkpoints, states.num_free) == (0, 2)


def test_a_prompt_that_is_cancelled_saves_nothing() -> None:
    chance, found = random.Random(5), memory(4)
    prompt = chat(chance, 100)
    started = found.start(prompt)
    assert started is not None
    found.cache.free(started)
    states = slots_of(found.cache)
    assert (states.num_free, states.num_checkpoints) == (4, 0)
    assert found.run(prompt) == 0


@pytest.mark.random
@pytest.mark.parametrize("seed", range(examples(12, 300)))
def test_random_conversations(seed: int) -> None:
    """Answers kept, cut, dropped or other; another user behind the same beginning; preempted; cancelled mid-prefill."""
    chance = random.Random(seed)
    num_slots, num_blocks = chance.choice([1, 2, 4, 9]), chance.choice([14, 30, 200])
    found = memory(num_slots, num_blocks)
    states = slots_of(found.cache)
    chats = [chat(chance, chance.randint(1, 60)) for _ in range(4)]
    running: list[tuple[Allocation, list[int]]] = []
    for _ in range(120):
        if running and chance.random() < 0.45:
            allocation, prompt = running.pop(chance.randrange(len(running)))
            written: list[int] = []
            if chance.random() < 0.8:
                found.prefill(allocation, prompt)
                written = [*prompt, *chat(chance, chance.randint(0, 8))]
                if chance.random() < 0.2 and allocation.state is not None:  # preempted
                    found.cache.free(allocation, written)
                    resumed = found.start(written, resumed=len(written) - allocation.num_tokens + 8)
                    if resumed is not None:
                        found.prefill(resumed, written)
                        found.cache.free(resumed, written)
                    continue
            found.cache.free(allocation, written)
            continue
        number = chance.randrange(len(chats))
        text = chats[number]
        kept = text[: chance.choice([len(text), len(text), len(text) // 2, len(text) - 5])]
        prompt = [*kept, *chat(chance, chance.randint(1, 40))][-num_blocks * SIZE // 3 :]
        answer_start = chance.choice([0, len(prompt), len(prompt) // 2])
        chats[number] = prompt if chance.random() < 0.8 else chat(chance, 5)
        started = found.start(prompt, answer_start=answer_start)
        if started is not None:
            running.append((started, prompt))
        held = sum(1 + len(one.state.saves) for one, _ in running if one.state is not None)
        assert states.num_free + states.num_checkpoints + held == num_slots and len(running) <= num_slots
    for allocation, _ in running:
        found.cache.free(allocation)
    assert states.num_free + states.num_checkpoints == num_slots
    slots = [one.slot for one in states._checkpoints]
    assert len(set(slots)) == len(slots)
    for one in states._checkpoints:
        assert one.node.checkpoints[one.offset] is one and 1 <= one.offset <= len(one.node.blocks)
