"""A draft model beside a model, both real and tiny: nothing changes but the number of steps."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drafts import drafts_in, speculator_of, use_drafts
from support.engine_shard import BLOCK, EngineShard, generations_of, mixed_requests, tokens_of
from support.loading import CPU, load
from support.tiny_models import tiny_checkpoint, write_tokenizer

from model_server.attention.choice import AttentionChoice
from model_server.batch.growth import BlockGrowth
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.drafters.draft_model import DraftModel
from model_server.features.drafts.drafters.drafter import DraftedRunner, Drafter
from model_server.features.drafts.load import find_speculator, load_drafter
from model_server.features.drafts.pace import Pace
from model_server.models.model import describe
from model_server.sampling.parameters import Grammar, SamplingParameters
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from wire.step_phases import DraftKind

FREE, CHEAP = Pace([(1, 1.0)]), Pace([(1, 0.01)])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and one that guesses otherwise."""
    root = tmp_path_factory.mktemp("models")
    return {
        "base": tiny_checkpoint("llama", root / "base", num_hidden_layers=2),
        "other": tiny_checkpoint("llama", root / "other", num_hidden_layers=1, hidden_size=32, seed=3),
    }


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders["base"])


def shard_of(
    tokenizer: Tokenizer,
    folders: dict[str, Path],
    draft: str | None,
    most: int = 4,
    model_pace: Pace = CHEAP,
    **options: Any,
) -> EngineShard:
    base: Any = load(folders["base"])
    if draft is None:
        return EngineShard(tokenizer, budget=1000, runner=base, **options)
    model = DraftModel(load(folders[draft]), base)
    whole: Any = DraftedRunner(base, model)
    shard = EngineShard(tokenizer, budget=1000, runner=whole, **options)
    speculator = DeviceModelSpeculator(most, 128, CPU, BLOCK, model, alone=True)
    speculator.pace, model.pace = FREE, model_pace
    use_drafts(shard.engine, speculator)
    return shard


def said(shard: EngineShard, tokenizer: Tokenizer) -> tuple[list[Any], int]:
    requests = mixed_requests(shard, tokenizer)
    results = shard.run_out(shard.prefill(0, *requests), 0)
    found = generations_of(*results)
    ids = [[i for g in found[one.id] if g.tokens is not None for i in g.tokens.ids] for one in requests]
    right = sum(one.right[DraftKind.MODEL] for one in drafts_in(results))
    return [ids, [found[one.id][-1].generated_text for one in requests]], right


@pytest.mark.parametrize("draft", ["base", "other"])
def test_each_kind_of_request_says_what_it_says_without(
    folders: dict[str, Path], tokenizer: Tokenizer, draft: str
) -> None:
    wanted, _ = said(shard_of(tokenizer, folders, None), tokenizer)
    found, right = said(shard_of(tokenizer, folders, draft), tokenizer)
    assert found == wanted
    assert right > 10 or draft != "base"


def test_a_model_that_guesses_right_is_right_in_every_place(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    """So its keys are those of the tokens before, also after a whole draft was right and over several blocks."""
    plain = shard_of(tokenizer, folders, None)
    shard = shard_of(tokenizer, folders, "base")
    results = {}
    for one in (plain, shard):
        results[one] = one.run_out(one.prefill(0, one.request([5, 6, 7, 8, 9], 41), one.request([3], 26)), 0)
    ids = [
        {key: [i for g in rows if g.tokens is not None for i in g.tokens.ids] for key, rows in found.items()}
        for found in (generations_of(*results[plain]), generations_of(*results[shard]))
    ]
    assert ids[0] == ids[1]
    drafted = drafts_in(results[shard])
    tokens, right = (sum(getattr(one, name)[DraftKind.MODEL] for one in drafted) for name in ("tokens", "right"))
    assert tokens == right > 40
    assert len(results[shard]) == 9


def test_keys_follow_chunks_plain_steps_growth_and_leavers(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    plain = shard_of(tokenizer, folders, None)
    wanted = plain.run_out(plain.prefill(0, plain.request(list(range(5, 26)), 30)), 0)
    shard = shard_of(tokenizer, folders, "base", grows=True)
    speculator = speculator_of(shard.engine)
    assert isinstance(speculator, DeviceModelSpeculator)
    request = shard.request(list(range(5, 26)), 30, tokens=24, chunk_len=6)
    other = shard.request([4, 4], 6)
    results = [shard.prefill(0, request, other, chunk_tokens=5)]
    for step in itertools.count():
        if results[-1].batch is None:
            break
        speculator.pace = FREE if step % 5 > 2 else None  # now and then steps without drafts
        growth = []
        (sequence,) = [s for s in shard.engine._store.find(0).batch.sequences if s.id == request.id]
        if len(sequence.slots) < sequence.cache_length + sequence.input_length + 2 and len(sequence.slots) < 52:
            growth = [BlockGrowth(request.id, np.array(shard.blocks(4)))]
        results.append(shard.decode(0, new_blocks=growth, chunk_tokens=5))
    (ids,) = [[i for g in rows if g.tokens for i in g.tokens.ids] for rows in generations_of(*wanted).values()]
    found = generations_of(*results)[request.id]
    assert [i for g in found if g.tokens is not None for i in g.tokens.ids] == ids
    drafted = drafts_in(results)
    assert sum(one.num_tokens for one in drafted) == sum(one.num_right for one in drafted) > 8


def test_a_request_that_was_preempted_is_drafted_for_as_before(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    prompt = list(range(5, 26))
    plain = shard_of(tokenizer, folders, None)
    request = plain.request(prompt, 30)
    ids = tokens_of(*plain.run_out(plain.prefill(0, request), 0))[request.id]
    shard = shard_of(tokenizer, folders, "base")
    again = shard.request(prompt, 30, resume_ids=tuple(ids[:9]), chunk_len=10)
    results = shard.run_out(shard.prefill(0, again, shard.request([7, 8], 3)), 0)
    assert tokens_of(*results)[again.id] == ids[9:]
    drafted = drafts_in(results)
    assert sum(one.num_tokens for one in drafted) == sum(one.num_right for one in drafted) > 8


def test_a_chunk_of_a_single_token_has_keys(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    """Its step looks like one in which all rows decode."""
    shard = shard_of(tokenizer, folders, "base")
    requests = [shard.request([5, 6, 7, 8, 9], 20, chunk_len=1) for _ in range(2)]
    results = shard.run_out(shard.prefill(0, *requests), 0)
    drafted = drafts_in(results)
    assert sum(one.num_tokens for one in drafted) == sum(one.num_right for one in drafted) > 16


def test_drafts_that_cost_too_much_are_not_made(folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    shard = shard_of(tokenizer, folders, "base", model_pace=Pace([(1, 10.0)]))
    results = shard.run_out(shard.prefill(0, shard.request([5], 100)), 0)
    assert sum(one.num_tokens for one in drafts_in(results)) == 0


def test_requests_of_a_model_that_guesses_wrong_do_not_each_find_that_out(
    folders: dict[str, Path], tokenizer: Tokenizer
) -> None:
    """One after the other, with drafts that pay where one in six is right."""
    shard = shard_of(tokenizer, folders, "other", model_pace=Pace([(1, 0.1)]), num_blocks=128)
    drafted = []
    for number in range(8):
        results = shard.run_out(shard.prefill(number, shard.request([5 + number], 30)), number)
        drafted.append(sum(one.num_tokens for one in drafts_in(results)))
    assert drafted[0] > 8 and drafted[-1] <= 1, drafted


def test_what_a_grammar_forces_pays_however_long_the_model_takes(
    folders: dict[str, Path], tokenizer: Tokenizer
) -> None:
    grammar = Grammar("regex", "the only text that fits here( and| or) nothing else at all")
    found = []
    for draft in (None, "other"):
        shard = shard_of(tokenizer, folders, draft, most=8, model_pace=Pace([(1, 1000.0)]))
        request = shard.request([1, 2], 60, sampling=SamplingParameters(grammar=grammar))
        results = shard.run_out(shard.prefill(0, request), 0)
        found.append((len(results), tokens_of(*results)[request.id]))
    assert found[0][1] == found[1][1] and found[1][0] < 0.5 * found[0][0]
    drafted = [one.tokens for one in drafts_in(results)]
    assert sum(one[DraftKind.GRAMMAR] for one in drafted) > 10 and not any(one[DraftKind.MODEL] for one in drafted)


@pytest.mark.parametrize("written_out", ["model", "draft"])
def test_a_gguf_file_may_write_spaces_out(written_out: str, tmp_path: Path, folders: dict[str, Path]) -> None:
    for name in ("model", "draft"):
        shutil.copytree(folders["other"], tmp_path / name)
        tokenizer = json.loads((tmp_path / name / "tokenizer.json").read_text())
        text = "  " if name == written_out else "▁▁"
        added = {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        number = len(tokenizer["model"]["vocab"])
        tokenizer["added_tokens"].append({"id": number, "special": False, **added})
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    find_speculator(str(tmp_path / "draft"), Tokenizer.load(tmp_path / "model"), tmp_path / "model")


def test_what_does_not_fit_is_refused(tmp_path: Path, folders: dict[str, Path], tokenizer: Tokenizer) -> None:
    def loaded(path: Path, vocab_size: int = tokenizer.vocab_size) -> Drafter:
        choice = AttentionChoice("reference", CPU)
        placement = Placement(CPU, torch.float32)
        model, base = describe(examine(folders["base"])), load(folders["base"])
        return load_drafter(find_speculator(str(path), tokenizer, path), 3, model, base, vocab_size, placement, choice)

    found = loaded(folders["other"])
    assert isinstance(found, DraftModel) and found.runner.vocab_size >= tokenizer.vocab_size
    with pytest.raises(StartupError, match=r"--speculator \S*other: its \d+ logits are fewer than the 9999 ids"):
        loaded(folders["other"], 9999)
    strange = tiny_checkpoint("llama", tmp_path / "strange", with_tokenizer=False)
    write_tokenizer(strange, vocab_size=tokenizer.vocab_size - 20)
    with pytest.raises(StartupError, match=r"gives id \d+ another text than the model's, .* for .*: choose a draft"):
        find_speculator(str(strange), tokenizer, strange)
    with pytest.raises(StartupError, match=r"^--speculator /nowhere: "):
        find_speculator("/nowhere", tokenizer, strange)
    with pytest.raises(StartupError, match="ID or ID@REVISION"):
        find_speculator("a@b@c", tokenizer, strange)
