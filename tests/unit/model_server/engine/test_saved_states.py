"""Prompts that continue from saved states: the tokens and scores of the same prompts computed whole.

The router's own allocator numbers blocks and slots; the shard runs a tiny model with gated delta nets.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.effort import examples
from support.engine_shard import BLOCK, EngineShard, generations_of
from support.loading import CPU, load
from support.tiny_models import tiny_checkpoint

from model_server.attention.choice import AttentionChoice
from model_server.batch.growth import BlockGrowth
from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.text.tokenizer import Tokenizer
from router.scheduling.cache.blocks import Allocation
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.cache.states import StateSlots

NUM_BLOCKS, NUM_SLOTS = 120, 5


@pytest.fixture(scope="module", params=["qwen3_5_text", "bamba", "jamba", "mamba", "qwen3_5_text in one call"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model_type, _, in_one_call = request.param.partition(" ")
    # Else the reference, which layers do not share a call with.
    backend = AttentionChoice(None, CPU, torch.float32).for_layers() if in_one_call else None
    folder = tiny_checkpoint(model_type, tmp_path_factory.mktemp("model"), with_tokenizer=False)
    found: Any = load(folder, backend=backend)
    found.traits.recurrent.reserve(NUM_SLOTS + 1)
    return found


def scores(results: Sequence[StepResult], request_id: int) -> list[tuple[int, float]]:
    parts = [one.tokens for one in generations_of(*results)[request_id] if one.tokens is not None]
    return [pair for tokens in parts for pair in zip(tokens.ids, tokens.logprobs, strict=True)]


class Server:
    """A shard, and the router's bookkeeping of it."""

    def __init__(self, tokenizer: Tokenizer, runner: Any, chance: random.Random) -> None:
        self.cache = PrefixCache(NUM_BLOCKS, BLOCK, StateSlots(NUM_SLOTS, BLOCK))
        self.shard = EngineShard(tokenizer, budget=64, grows=True, num_blocks=NUM_BLOCKS, runner=runner)
        self.chance = chance

    def admit(self, prompt: list[int], count: int, resumed: list[int]) -> tuple[NewRequest, Allocation] | None:
        ids = [*prompt, *resumed]
        found = self.cache.allocate(len(ids), ids, num_prompt=len(prompt))
        if found is None:
            return None
        state = found.state
        assert state is not None
        left = len(ids) - found.prefix_length
        request = self.shard.request(
            prompt, count, tokens=BLOCK, blocks=np.array(found.blocks, np.int32), cache_len=found.prefix_length,
            chunk_len=self.chance.randint(1, left), resume_ids=tuple(resumed), state_slot=state.slot,
            state_from=state.restored_from, state_saves=tuple((save.position, save.slot) for save in state.saves),
        )  # fmt: skip
        return request, found

    def run(self, asked: Sequence[tuple[list[int], int]]) -> list[list[tuple[int, float]]]:
        """Run the prompts in one batch; now and then one is preempted and computed again."""
        answers: list[list[tuple[int, float]]] = [[] for _ in asked]
        waiting = list(range(len(asked)))
        while waiting:
            admitted: dict[int, tuple[NewRequest, Allocation]] = {}
            for number in waiting:
                prompt, count = asked[number]
                one = self.admit(prompt, count, [token for token, _ in answers[number]])
                if one is not None:
                    admitted[number] = one
            assert admitted
            stops_at = self.chance.choice([None, 1, 3])
            self._run_some(admitted, answers, stops_at)
            for number, (_, allocation) in admitted.items():
                written = [*asked[number][0], *(token for token, _ in answers[number][:-1])]
                self.cache.free(allocation, written)
            waiting = [number for number in waiting if len(answers[number]) < asked[number][1]]
        return answers

    def _run_some(
        self,
        admitted: dict[int, tuple[NewRequest, Allocation]],
        answers: list[list[tuple[int, float]]],
        stops_at: int | None,
    ) -> None:
        """Run to the end, or until each has that many tokens more."""
        step = self.shard.prefill(0, *(request for request, _ in admitted.values()), chunk_tokens=20)
        self._note(step, admitted, answers)
        before = {number: len(answers[number]) for number in admitted}
        while step.batch is not None:
            if stops_at is not None and all(len(answers[n]) >= max(before[n], 1) + stops_at for n in admitted):
                self.shard.engine.clear(0)
                return
            growth = []
            for request, allocation in admitted.values():
                blocks = self.cache.extend(allocation, 1)
                assert blocks is not None
                growth.append(BlockGrowth(request.id, np.array(blocks, np.int64)))
            running = set(step.batch.request_ids)
            step = self.shard.decode(
                0, new_blocks=[one for one in growth if one.request_id in running], chunk_tokens=20
            )
            self._note(step, admitted, answers)

    def _note(
        self,
        step: StepResult,
        admitted: dict[int, tuple[NewRequest, Allocation]],
        answers: list[list[tuple[int, float]]],
    ) -> None:
        found = generations_of(step)
        for number, (request, allocation) in admitted.items():
            if request.id in found:
                assert found[request.id][0].error is None
                is_first = len(answers[number]) == len(request.resume_ids)
                answers[number] += scores([step], request.id)
                if is_first:
                    self.cache.commit(allocation, [*request.input_ids, *request.resume_ids])


@pytest.mark.parametrize("runner", ["qwen3_5_text", "qwen3_5_text in one call"], indirect=True)
def test_what_follows_a_restored_state_has_the_bits_of_a_prompt_that_is_cut_there(
    runner: Any, tiny_tokenizer: Tokenizer
) -> None:
    chance = random.Random(7)
    first = [chance.randrange(20, 200) for _ in range(100)]
    second = [*first, *(chance.randrange(20, 200) for _ in range(30))]
    with torch.inference_mode():
        server = Server(tiny_tokenizer, runner, chance)
        server.run([(first, 1)])
        admitted = server.admit(second, 9, [])
        assert admitted is not None
        request, found = admitted
        assert found.prefix_length == 88 and found.state is not None
        shard, blocks = server.shard, server.cache.extend(found, 3)
        assert blocks is not None
        whole = dataclasses.replace(request, chunk_len=None, blocks=np.array(found.blocks, np.int32))
        answer = scores(shard.run_out(shard.prefill(0, whole), 0), request.id)
        alone = EngineShard(tiny_tokenizer, budget=1000, num_blocks=NUM_BLOCKS, runner=runner)
        cut = alone.request(second, 9, chunk_len=found.prefix_length)
        expected = scores(alone.run_out(alone.prefill(0, cut), 0), cut.id)
    assert answer == expected


@pytest.mark.random
@pytest.mark.parametrize("seed", range(examples(2, 40)))
def test_chats_get_the_same_with_and_without_the_prefix_cache(
    seed: int, runner: Any, tiny_tokenizer: Tokenizer
) -> None:
    """Answers kept, dropped or cut; other users behind the same beginning; preempted requests."""
    chance = random.Random(seed)
    system = [chance.randrange(20, 200) for _ in range(40)]
    chats = [[*system, *(chance.randrange(20, 200) for _ in range(5 * i))] for i in range(3)]
    with torch.inference_mode():
        server = Server(tiny_tokenizer, runner, chance)
        for _ in range(3):
            numbers = chance.sample(range(3), chance.randint(1, 2))
            asked = []
            for number in numbers:
                chats[number] += [chance.randrange(20, 200) for _ in range(chance.randint(1, 25))]
                asked.append((list(chats[number]), chance.randint(1, 6)))
            found = server.run(asked)
            for number, (prompt, count), answer in zip(numbers, asked, found, strict=True):
                alone = EngineShard(tiny_tokenizer, budget=1000, num_blocks=NUM_BLOCKS, runner=runner)
                whole = alone.request(prompt, count)
                expected = scores(alone.run_out(alone.prefill(0, whole), 0), whole.id)
                # Not bit by bit: products of other numbers of rows add in another order.
                assert [token for token, _ in answer] == [token for token, _ in expected]
                assert [score for _, score in answer] == pytest.approx([score for _, score in expected], abs=1e-4)
                if chance.random() < 0.6:
                    chats[number] += [token for token, _ in answer][: chance.choice([1, 9])]
    states = server.cache.states
    assert states is not None and states.counts.saved
    assert states.counts.restored or states.counts.recomputed  # what is cached was met, with a state or without
    assert states.num_free + states.num_checkpoints == NUM_SLOTS
