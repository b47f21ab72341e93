"""Rows get the slots of their adapters, and keep them for as long as they run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine_shard import EngineShard, errors_of
from support.fake_model import FakeRunner
from support.tiny_models import write_tokenizer

from model_server.adapters.rows import BASE
from model_server.adapters.slots.table import SlotTable
from model_server.batch.sequence import NewRequest
from model_server.runner.runner import RunnerTraits
from model_server.text.tokenizer import Tokenizer


class Slots:
    """A shard of three adapters and two slots. held: the number of the adapter in each slot."""

    def __init__(self, tokenizer: Tokenizer, **options: bool) -> None:
        self.held: dict[int, int] = {}
        self.table = SlotTable(2, self._copy)
        traits = RunnerTraits(adapters=("a", "b", "c"), slots=self.table)
        self.runner = FakeRunner(vocab_size=tokenizer.vocab_size, traits=traits)
        self.shard = EngineShard(tokenizer, runner=self.runner, budget=64, **options)

    def _copy(self, slot: int, number: int) -> bool:
        self.held[slot] = number
        return False

    def request(self, adapter: str | None, new_tokens: int) -> NewRequest:
        return self.shard.request([1, 2], new_tokens, adapter_id=adapter)

    @property
    def adapters(self) -> list[int]:
        """Of each row of the last step, as its slot had it then."""
        inputs = self.runner.last_inputs
        assert inputs is not None
        if inputs.adapters is None:
            return []
        return [BASE if slot == BASE else self.held[slot] for slot in inputs.adapters.numbers.tolist()]


@pytest.fixture
def slots(tokenizer: Tokenizer) -> Slots:
    return Slots(tokenizer)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def test_a_slot_is_taken_again_when_the_rows_of_its_adapter_have_ended(slots: Slots) -> None:
    shard = slots.shard
    shard.prefill(0, slots.request("a", 3), slots.request(None, 9), slots.request("b", 9))
    assert slots.adapters == [0, 0, BASE, BASE, 1, 1]
    late = slots.request("c", 9)
    assert errors_of(shard.prefill(1, late, cached=0)) == {
        late.id: f"request {late.id}: rows that run have other adapters in all 2 slots; raise --lora-slots"
    }
    assert slots.adapters == [0, BASE, 1], "the others go on"
    shard.decode(0)
    assert not errors_of(shard.prefill(2, slots.request("c", 2), slots.request("b", 3), cached=0))
    assert slots.adapters == [BASE, 1, 2, 2, 1, 1]
    shard.decode(0)
    assert slots.adapters == [BASE, 1, 2, 1]
    assert slots.table.num_loads == 3


def test_requests_of_one_call_share_the_slots(slots: Slots) -> None:
    requests = [slots.request(name, 4) for name in ("c", "a", "b", "c")]
    errors = errors_of(slots.shard.prefill(0, *requests))
    assert set(errors) == {requests[2].id}
    assert slots.adapters == [2, 2, 0, 0, 2, 2]


def test_requests_that_were_filtered_away_free_their_slots(slots: Slots) -> None:
    shard = slots.shard
    first, second = slots.request("a", 9), slots.request("b", 9)
    shard.prefill(0, first, second)
    shard.engine.filter(0, [second.id])
    assert not errors_of(shard.prefill(1, slots.request("c", 9), cached=0))
    assert slots.adapters == [1, 2, 2]


def test_a_row_of_the_warm_up_computes_with_a_slot_that_has_no_adapter(slots: Slots) -> None:
    slots.held[0] = -7
    shard = slots.shard
    shard.prefill(0, shard.request([1, 2], 2, adapter_slot=0))
    assert slots.adapters == [-7, -7] and slots.table.num_loads == 0
