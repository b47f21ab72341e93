"""Drafters that compute, on a device: drafts are those of the formulas wherever they begin; no token is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_drafters import drafting_on_a_gpu, found_in
from support.drafted_shard import Asked, ids_of
from support.engine_shard import EngineShard, generations_of, mixed_requests, tokens_of
from support.loading import load
from support.meeting_ranks import on_ranks
from support.tiny_drafters import eagle3, medusa, mlp_speculator, with_mtp
from support.tiny_models import tiny_checkpoint
from transformers import AutoModelForCausalLM
from unit.model_server.engine.test_device_windows import said
from unit.model_server.features.drafts.drafters import test_eagle, test_heads, test_mtp

from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine.engine import Engine
from model_server.text.tokenizer import Tokenizer

KINDS = ("medusa", "mlp", "eagle", "eagle nested", "mtp", "model", "same model")
MOST = 3
# `make test` has every kind in steps ahead, and one or two of them in each of the other tests.
WEEKLY = pytest.mark.weekly
# Needs the host, which lays out what the drafter guesses.
GRAMMAR, WATERMARK = 4, 7


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("device-drafters")
    tiny_checkpoint("llama", root / "base", num_hidden_layers=4, vocab_size=320)
    tiny_checkpoint("llama", root / "whole", num_hidden_layers=3, vocab_size=320)
    tiny_checkpoint("llama", root / "mtp", num_hidden_layers=3, vocab_size=320)
    with_mtp(root / "mtp")
    medusa(root / "medusa", number=MOST)
    mlp_speculator(root / "mlp", tied=True, scales_input=True, number=MOST)
    eagle3(root / "eagle", **test_eagle.KINDS["midlayer"])
    eagle3(root / "eagle nested", **test_eagle.KINDS["nested"])
    tiny_checkpoint("llama", root / "model", num_hidden_layers=1, hidden_size=32, vocab_size=320, seed=3)
    return root


def base_of(kind: str, root: Path) -> Path:
    return root / ("mtp" if kind == "mtp" else "base")


def folder_of(kind: str, root: Path) -> Path | str:
    return kind if kind == "mtp" else root / ("base" if kind == "same model" else kind)


def drafts_of(kind: str, root: Path) -> Callable[[list[int], list[int], int], list[int]]:
    """Written from the formulas: tokens of a row, and the first of its draft -> so many behind them."""
    library = AutoModelForCausalLM.from_pretrained(base_of(kind, root))
    folder = root / kind

    def heads(ids: list[int], forced: list[int], most: int) -> list[int]:
        hidden = library(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0][-2]
        return test_heads.reference(folder, root / "base", hidden, ids[-1], forced, len(forced) + most)[len(forced) :]

    def model(ids: list[int], forced: list[int], most: int) -> list[int]:
        ids = [*ids, *forced]
        for _ in range(most):
            ids = [*ids, int(drafter(torch.tensor([ids])).logits[0, -1].argmax())]
        return ids[-most:]

    drafter = AutoModelForCausalLM.from_pretrained(folder_of(kind, root)) if "model" in kind else None
    if kind in ("medusa", "mlp"):
        return heads
    if "model" in kind:
        return model
    reference: Any = (
        test_mtp.Reference(root / "whole", folder)
        if kind == "mtp"
        else test_eagle.Reference(folder, root / "base", library)
    )
    return reference.draft  # type: ignore[no-any-return]


def assert_formulas(kind: str, root: Path, asked: list[Asked]) -> None:
    reference = drafts_of(kind, root)
    for ids, forced, draft in asked:
        assert draft == reference(ids, forced, len(draft))


def chosen(shard: EngineShard, tokenizer: Tokenizer, *, all_kinds: bool = False) -> list[NewRequest]:
    requests = mixed_requests(shard, tokenizer)
    return requests if all_kinds else [one for n, one in enumerate(requests) if n not in (GRAMMAR, WATERMARK)]


@pytest.mark.parametrize(
    ("kind", "ahead"),
    [
        pytest.param(
            kind,
            ahead,
            id=f"{kind}-{'ahead' if ahead else 'in turn'}",
            marks=WEEKLY if not ahead else () if kind in ("eagle", "mtp", "model") else pytest.mark.long,
        )
        for kind in KINDS
        for ahead in (False, True)
    ],
)
def test_drafts_are_those_of_the_formulas_and_tokens_those_without(
    kind: str, ahead: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(kind, root)
    tokenizer = Tokenizer.load(base)
    plain: Any = EngineShard(tokenizer, budget=1000, runner=load(base))  # type: ignore[arg-type]
    wanted = said(plain, chosen(plain, tokenizer), ahead=False)
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    shard, asked = drafting_on_a_gpu(tokenizer, base, found_in(folder_of(kind, root), tokenizer, base), MOST)
    assert said(shard, chosen(shard, tokenizer), ahead=ahead) == wanted
    assert len(asked) > 15
    assert_formulas(kind, root, asked[:: 1 if ahead else 4])


@pytest.mark.parametrize(
    "kind", [pytest.param("medusa", marks=WEEKLY), "eagle", pytest.param("same model", marks=WEEKLY)]
)
def test_beside_requests_that_need_the_host(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter guesses for windows that the host makes, too, behind what a grammar forces."""
    base = base_of(kind, root)
    tokenizer = Tokenizer.load(base)
    plain: Any = EngineShard(tokenizer, budget=1000, runner=load(base), num_blocks=256)  # type: ignore[arg-type]

    def requests_of(shard: EngineShard) -> list[NewRequest]:
        mixed = mixed_requests(shard, tokenizer)
        return [*(mixed[number] for number in (0, 1, 2, GRAMMAR)), *(shard.request([5 + n, 8], 24) for n in range(2))]

    wanted = said(plain, requests_of(plain), ahead=False)
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    shard, asked = drafting_on_a_gpu(tokenizer, base, found_in(folder_of(kind, root), tokenizer, base), MOST)
    assert said(shard, requests_of(shard), ahead=True) == wanted
    assert len(asked) > 5
    assert_formulas(kind, root, asked)


@pytest.mark.parametrize(
    "kind", [pytest.param("mlp", marks=WEEKLY), "eagle", "mtp", pytest.param("same model", marks=WEEKLY)]
)
def test_requests_join_and_leave(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts come in chunks beside what is running; drafts behind them are those of the formulas."""
    base = base_of(kind, root)
    tokenizer = Tokenizer.load(base)
    monkeypatch.setattr(Engine, "_runs_ahead", True)

    def run(shard: EngineShard) -> dict[int, list[int]]:
        first, second, third, fourth = (
            shard.request([(5 * n + 3 * j) % 60 + 2 for j in range(length)], 30)
            for n, length in enumerate((5, 9, 41, 1))
        )
        results = [shard.prefill(0, first, second), *(shard.decode(0) for _ in range(3))]
        results += [shard.prefill(1, third, cached=0), shard.decode(0), shard.decode(0)]
        shard.engine.filter(0, [first.id, third.id])
        results += [shard.decode(0), shard.prefill(2, fourth, cached=0)]
        while results[-1].batch is not None:
            results.append(shard.decode(0))
        found = tokens_of(*results)
        return {one.id: found[one.id] for one in (first, third, fourth)}

    plain: Any = EngineShard(tokenizer, budget=20, runner=load(base))  # type: ignore[arg-type]
    wanted = run(plain)
    shard, asked = drafting_on_a_gpu(
        tokenizer, base, found_in(folder_of(kind, root), tokenizer, base), MOST, seed=1, budget=20
    )
    assert run(shard) == wanted
    assert len(asked) > 15
    assert_formulas(kind, root, asked)


@pytest.mark.parametrize(
    "kind", [pytest.param("medusa", marks=WEEKLY), "eagle", pytest.param("mtp", marks=WEEKLY), "model"]
)
def test_two_ranks_draft_and_say_what_one_does(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(kind, root)
    tokenizer = Tokenizer.load(base)
    monkeypatch.setattr(Engine, "_runs_ahead", True)

    def work(group: ProcessGroup) -> tuple[dict[int, list[int]], list[Asked]]:
        found = found_in(folder_of(kind, root), tokenizer, base)
        shard, asked = drafting_on_a_gpu(tokenizer, base, found, MOST, group=group if group.size > 1 else None)
        results = [shard.prefill(0, *[shard.request([5 + i, 6, 7, 8], 12) for i in range(3)])]
        while results[-1].batch is not None:
            results.append(shard.decode(0))
        return ids_of(generations_of(*results)), asked

    alone, drafts = work(ProcessGroup())
    ranks = on_ranks(2, work)
    assert ranks[0][0] | ranks[1][0] == alone
    assert ranks[0][1] == ranks[1][1] == drafts
