"""Rows get the slots of their adapters, and keep them for as long as they run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.device_windows import Dice, guessing, on_a_gpu
from support.drafts import use_drafts
from support.engine_shard import EngineShard, errors_of
from support.fake_model import FakeRunner
from support.graph_doubles import CapturableRunner
from support.tiny_models import write_tokenizer

from model_server.adapters.rows import BASE
from model_server.adapters.slot_table import SlotTable
from model_server.batch.sequence import NewRequest, Sequence
from model_server.engine.engine import Engine
from model_server.features.drafts.device.speculator import BatchWindows
from model_server.features.drafts.speculator import Compute, Speculator
from model_server.features.drafts.window import Window
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
        return [BASE if slot == BASE else self.held[slot] for slot in inputs.adapters.all.numbers.tolist()]


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
    shard.prefill(0, shard.request([1, 2], 2, is_trial=True))
    assert slots.adapters == [-7, -7] and slots.table.num_loads == 0


def test_an_adapter_that_the_model_does_not_have_is_refused_alone(slots: Slots) -> None:
    bad, good = slots.request("d", 9), slots.request("a", 9)
    assert errors_of(slots.shard.prefill(0, bad, good)) == {bad.id: f"request {bad.id}: no adapter 'd' is loaded"}
    assert slots.adapters == [0, 0]


class Drafts(Speculator):
    """One more token for each row than for the one before."""

    def window(self, rows: list[Sequence], compute: Compute | None = None) -> Window:
        return Window(rows, [[5] * number for number, _ in enumerate(rows)])


def test_each_place_of_a_draft_has_the_adapter_of_its_row(slots: Slots) -> None:
    shard = slots.shard
    use_drafts(shard.engine, Drafts(3))
    shard.prefill(0, slots.request("b", 9), slots.request(None, 9), slots.request("a", 9))
    shard.decode(0)
    assert slots.adapters == [1, BASE, BASE, 0, 0, 0]


class AlwaysTwo(Dice):
    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        return 2


def test_drafts_of_the_device_keep_the_adapters_of_their_rows(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    vocab_size, dice = tokenizer.vocab_size, random.Random(0)
    table = SlotTable(2, lambda slot, number: False)
    runner = CapturableRunner(vocab_size=vocab_size, traits=RunnerTraits(adapters=("a", "b"), slots=table))
    found = []
    with torch.inference_mode():
        shard = on_a_gpu(tokenizer, AlwaysTwo(2, dice, guessing(vocab_size, dice, 0.0)), runner=runner)
        shard.prefill(0, *(shard.request([1, 2], 20, adapter_id=name) for name in ("b", None, "a")))
        for _ in range(3):
            shard.decode(0)
            assert runner.last_inputs is not None
            found.append(runner.last_inputs.adapters)
    assert found[0] is not None and found[0].all.numbers.tolist() == [0, 0, 0, BASE, BASE, BASE, 1, 1, 1]
    assert found[1] is found[0] and found[2] is found[0]
