"""What saved states spare: simulated chats on the router's own prefix cache, without a model.

Forty conversations in turn, twelve at a time, behind four system prompts; blocks never run out, slots of states do. It
prints the share of prompt tokens that is computed, by the number of slots: with the router's policy, with one that
saves the last border of each prompt and evicts what was used least recently, and the least that is possible.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from router.scheduling.cache.blocks import Allocation
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.cache.radix import RadixNode
from router.scheduling.cache.states import Kind, Save, StatePlace, StateSlots

OUT = Path(__file__).parent / "out" / "states.json"
BLOCK, MANY_BLOCKS = 16, 10**9
NUM_CHATS, NUM_ACTIVE, NUM_SYSTEMS, SYSTEM_TOKENS, NUM_TURNS = 40, 12, 4, 3000, 8
# What opens an answer where it is generated; a later turn has the first three alone.
OPENING = [1, 2, 3, 4, 5]
KEPT = OPENING[:3]
CLOSING = [6, 7]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many tokens the parts of a chat have, (least, most)."""

    user: tuple[int, int] = (20, 150)
    # In front of every answer and call; left out of the chat from the next user message on.
    reasoning: tuple[int, int] = (200, 800)
    answer: tuple[int, int] = (100, 300)
    # Calls of tools a turn.
    calls: tuple[int, int] = (0, 0)
    call: tuple[int, int] = (30, 80)
    result: tuple[int, int] = (100, 900)


SHAPES = {"chat, reasoning left out": Shape(), "agent, 3 to 8 calls a turn": Shape(reasoning=(20, 120), calls=(3, 8))}


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, how much of it is in front of all answers to its last user message, and what the model answers."""

    prompt: list[int]
    answer_start: int
    answer: list[int]


class PlainSlots(StateSlots):
    """Saves the last border of each prompt, and evicts what was used least recently."""

    def plan_saves(
        self, place: StatePlace, num_computed: int, num_known: int, *, answer_start: int = 0, is_junction: bool = True
    ) -> None:
        position = (place.num_prompt - 1) // self._grid * self._grid
        if position > num_computed and (slot := self._acquire(place.restored)) is not None:
            place.saves.append(Save(position, slot, Kind.END))

    def register(self, place: StatePlace, node: RadixNode, depth: int, block_size: int) -> None:
        super().register(place, node, depth, block_size)
        if place.restored is not None:
            place.restored.kind = Kind.END


def conversation(shape: Shape, system: list[int], chance: random.Random) -> Iterator[Asked]:
    """Yield the prompts of a conversation one after another."""

    def text(bounds: tuple[int, int]) -> list[int]:
        return [chance.randrange(100, 100_000) for _ in range(chance.randint(*bounds))]

    past = system
    for _ in range(NUM_TURNS):
        past = [*past, *text(shape.user), *CLOSING]
        whole, later = past, past  # with what was thought in this turn, and without
        num_calls = chance.randint(*shape.calls)
        for number in range(num_calls + 1):
            is_last = number == num_calls
            thought, said = text(shape.reasoning), text(shape.answer if is_last else shape.call)
            yield Asked([*whole, *OPENING], len(past) + len(OPENING), [*thought, *said])
            said += CLOSING
            if not is_last:
                said += [*text(shape.result), *CLOSING]
            whole = [*whole, *OPENING, *thought, *said]
            later = [*later, *KEPT, *said]
        past = later


def replay(
    shape: Shape, cache: PrefixCache, seed: int = 0, *, num_chats: int = NUM_CHATS, num_active: int = NUM_ACTIVE
) -> float:
    """Run the conversations, `num_active` requests at a time; return the share of prompt tokens that is computed."""
    chance = random.Random(seed)
    systems = [[chance.randrange(100, 100_000) for _ in range(SYSTEM_TOKENS)] for _ in range(NUM_SYSTEMS)]
    waiting = [conversation(shape, systems[i % NUM_SYSTEMS], random.Random(seed + i)) for i in range(num_chats)]
    active, waiting = waiting[:num_active], waiting[num_active:]
    running: dict[int, tuple[Allocation, list[int]]] = {}
    asked = computed = 0
    while active:
        number = chance.randrange(len(active))
        chat = active[number]
        if id(chat) in running:
            cache.free(*running.pop(id(chat)))
        one = next(chat, None)
        if one is None:
            active[number : number + 1] = waiting[:1]
            del waiting[:1]
            continue
        found = cache.allocate(len(one.prompt) + len(one.answer), one.prompt, answer_start=one.answer_start)
        assert found is not None, "every running request has a slot"
        cache.commit(found, one.prompt)
        running[id(chat)] = found, [*one.prompt, *one.answer]
        asked += len(one.prompt)
        computed += len(one.prompt) - min(found.prefix_length, len(one.prompt) - 1)
    return computed / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="24,48,96,400", help="comma-separated")
    parser.add_argument("--grid", type=int, default=64, help="states are saved at multiples of so many tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    slots = [int(number) for number in options.slots.split(",")]

    report: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        bound = replay(shape, PrefixCache(MANY_BLOCKS, 1), options.seed)
        for policy, kind in (("last border", PlainSlots), ("router", StateSlots)):
            shares = {
                str(number): replay(shape, PrefixCache(MANY_BLOCKS, BLOCK, kind(number, options.grid)), options.seed)
                for number in slots
            }
            report[f"{name}: {policy}"] = {**shares, "bound": bound}
    table = Table("share of prompt tokens computed", title="simulated chats on the router's prefix cache")
    for column in (*(f"{number} slots" for number in slots), "bound"):
        table.add_column(column, justify="right")
    for name, row in report.items():
        table.add_row(name, *(f"{share:.1%}" for share in row.values()))
    Console(width=120).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"seed": options.seed, "grid": options.grid, "shares": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
