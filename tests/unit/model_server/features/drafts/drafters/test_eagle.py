"""EAGLE-3: drafts are those of the formulas, whatever was computed when; and no token is another."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.drafted_shard import check_two_ranks, drafter_of, ids_of, shard_of
from support.drafts import drafts_in, speculator_of
from support.engine_shard import generations_of, mixed_requests, tokens_of
from support.loading import load
from support.tiny_drafters import eagle3
from support.tiny_models import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_server.batch.growth import BlockGrowth
from model_server.errors import StartupError
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.drafters.layer_drafter import LayerDrafts
from model_server.features.drafts.drafters.queries import RowsAt
from model_server.text.tokenizer import Tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "midlayer": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    "nested": {
        "nested": True, "prefix": "layers.0.", "norm_before_residual": True, "norm_output": True,
        "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 2], "own_embedding": True,
    },
    "whole": {"draft_vocab": None, "fc_norm": True, "states": 2, "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [3, 0]}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("eagle") / "base", num_hidden_layers=4, vocab_size=320)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Tokenizer:
    return Tokenizer.load(base)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("eagles")
    return {kind: eagle3(root / kind, **options) for kind, options in KINDS.items()}


@pytest.fixture(scope="module")
def library(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


class Reference:
    """Written from the formulas, in float32, over all positions at once."""

    def __init__(self, folder: Path, base: Path, library: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.options = {**config, **config.get("eagle_config", {})}
        self.layer = config.get("transformer_layer_config", config)
        self.tensors = load_file(folder / "model.safetensors")
        self.prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."
        shared = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
        self.embedding = self.tensors.get("embed_tokens.weight", shared)
        self.library = library

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.tensors[name]

    def states(self, ids: list[int]) -> Tensor:
        found = self.library(torch.tensor([ids]), output_hidden_states=True).hidden_states
        parts = [found[layer][0] for layer in self.options["eagle_aux_hidden_state_layer_ids"]]
        if self.options.get("fc_norm"):
            parts = [self.norm(f"fc_norm.{place}.weight", part) for place, part in enumerate(parts)]
        x = torch.cat(parts, -1)
        if self.options.get("norm_before_fc"):
            x = self.norm("input_norm.weight", x)
        return x @ self.tensors["fc.weight"].T

    def forward(self, ids: list[int], f: Tensor) -> Tensor:
        """The layer at all positions; ids: of the tokens behind them."""
        t, p, dim = self.tensors, self.prefix, self.layer["head_dim"]
        normed = self.norm(p + "hidden_norm.weight", f)
        x = torch.cat([self.norm(p + "input_layernorm.weight", self.embedding[ids]), normed], -1)

        def heads(name: str) -> Tensor:
            return (x @ t[f"{p}self_attn.{name}_proj.weight"].T).view(len(ids), -1, dim).transpose(0, 1)

        angles = torch.arange(len(ids))[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotated(y: Tensor) -> Tensor:
            return y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin

        q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
        k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        values = ((q @ k.transpose(1, 2) / dim**0.5 + mask).softmax(-1) @ v).transpose(0, 1).flatten(1)
        residual = normed if self.options.get("norm_before_residual") else f
        residual = residual + values @ t[p + "self_attn.o_proj.weight"].T
        x = self.norm(p + "post_attention_layernorm.weight", residual)
        gate, up = (x @ t[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return residual + (F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T

    def draft(self, ids: list[int], forced: list[int], most: int) -> list[int]:
        f, tokens, found = self.states(ids[:-1]), list(ids[1:]), list[int]()
        for place in range(len(forced) + most):
            out = self.forward(tokens, f)[-1:]
            best = int((self.norm("norm.weight", out) @ self.tensors["lm_head.weight"].T).argmax())
            best += int(self.tensors["d2t"][best]) if "d2t" in self.tensors else 0
            found.append(forced[place] if place < len(forced) else best)
            tokens.append(found[-1])
            f = torch.cat([f, self.norm("norm.weight", out) if self.options.get("norm_output") else out])
        return found[len(forced) :]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas_and_tokens_those_without(
    kind: str, folders: dict[str, Path], base: Path, tokenizer: Tokenizer, library: Any
) -> None:
    plain, _ = shard_of(tokenizer, base, None)
    wanted = generations_of(*plain.run_out(plain.prefill(0, *mixed_requests(plain, tokenizer)), 0))
    shard, asked = shard_of(tokenizer, base, folders[kind])
    found = generations_of(*shard.run_out(shard.prefill(0, *mixed_requests(shard, tokenizer)), 0))
    assert ids_of(found) == ids_of(wanted)
    assert [rows[-1].generated_text for rows in found.values()] == [g[-1].generated_text for g in wanted.values()]
    reference = Reference(folders[kind], base, library)
    assert len(asked) > 40
    for ids, forced, draft in asked[::2]:
        assert draft == reference.draft(ids, forced, len(draft))


def test_through_chunks_growth_and_what_was_right(
    folders: dict[str, Path], base: Path, tokenizer: Tokenizer, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right move several positions on; forced here by drafting what the request says."""
    plain, _ = shard_of(tokenizer, base, None)
    prompt = list(range(5, 26))
    request = plain.request(prompt, 30)
    said = tokens_of(*plain.run_out(plain.prefill(0, request), 0))[request.id]
    shard, asked = shard_of(tokenizer, base, folders["midlayer"], grows=True)
    speculator = speculator_of(shard.engine)
    assert isinstance(speculator, DeviceModelSpeculator)
    draft = LayerDrafts.draft
    right = itertools.count()

    def sometimes_right(self: LayerDrafts, rows: RowsAt, length: int, forced: Any = None) -> tuple[Tensor, Tensor]:
        found, valid = draft(self, rows, length, forced)
        if length and next(right) % 2:
            for row, start in enumerate(rows.start.tolist()):
                if rows.history[row, : len(prompt)].tolist() == prompt:
                    following = said[start + 1 - len(prompt) :][:length]
                    found[row, : len(following)] = torch.tensor(following)
        return found, valid

    first, other = shard.request(prompt, 30, tokens=24, chunk_len=6), shard.request([4, 4], 6)
    results = [shard.prefill(0, first, other, chunk_tokens=5)]
    for step in itertools.count():
        if results[-1].batch is None:
            break
        monkeypatch.setattr(LayerDrafts, "draft", sometimes_right)
        monkeypatch.setattr(speculator, "length", lambda *_, step=step: (0, 4, 2)[step % 3])
        growth = []
        (sequence,) = [s for s in shard.engine._store.find(0).batch.sequences if s.id == first.id]
        if len(sequence.slots) < sequence.cache_length + sequence.input_length + 4 and len(sequence.slots) < 52:
            growth = [BlockGrowth(first.id, np.array(shard.blocks(4)))]
        results.append(shard.decode(0, new_blocks=growth, chunk_tokens=5))
    assert tokens_of(*results)[first.id] == said
    assert sum(one.num_right for one in drafts_in(results)) > 4
    reference = Reference(folders["midlayer"], base, library)
    of_first = [one for one in asked if one.ids[: len(prompt)] == prompt]
    assert len(of_first) > 5
    behind = [said[len(one.ids) - len(prompt) :][: len(one.draft)] for one in of_first]
    for (ids, forced, found), following in zip(of_first, behind, strict=True):
        assert found in (reference.draft(ids, forced, len(found)), following)
    assert sum(one.draft != following for one, following in zip(of_first, behind, strict=True)) > 3


def test_a_request_that_was_preempted(folders: dict[str, Path], base: Path, tokenizer: Tokenizer, library: Any) -> None:
    plain, _ = shard_of(tokenizer, base, None)
    request = plain.request([5, 6, 7, 8], 20)
    said = tokens_of(*plain.run_out(plain.prefill(0, request), 0))[request.id]
    shard, asked = shard_of(tokenizer, base, folders["nested"])
    again = shard.request([5, 6, 7, 8], 20, resume_ids=tuple(said[:9]), chunk_len=6)
    assert tokens_of(*shard.run_out(shard.prefill(0, again), 0))[again.id] == said[9:]
    reference = Reference(folders["nested"], base, library)
    for ids, forced, found in asked:
        assert found == reference.draft(ids, forced, len(found))


@pytest.mark.parametrize("kind", ["midlayer", "nested"])
def test_two_ranks_draft_and_say_what_one_does(
    kind: str, folders: dict[str, Path], base: Path, tokenizer: Tokenizer
) -> None:
    check_two_ranks(tokenizer, base, folders[kind])


def test_what_does_not_fit_is_refused(tmp_path: Path, base: Path, tokenizer: Tokenizer) -> None:
    def refusal(folder: Path, words: str) -> None:
        with pytest.raises(StartupError, match=rf"^--speculator {folder}: .*{words}"):
            drafter_of(folder, base, load(base), tokenizer)

    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    refusal(eagle3(tmp_path / "wide", hidden=32, **layers), "hidden states have 32 numbers, the model's 64")
    refusal(eagle3(tmp_path / "layers", eagle_aux_hidden_state_layer_ids=[0, 2, 9]), r"layers \[0, 2, 9\].* 4 layers")
    refusal(eagle3(tmp_path / "default"), r"layers \[2, 2, 1\]")
    refusal(eagle3(tmp_path / "vocab", draft_vocab=None, vocab=400, **layers), "has 400 rows, the model 320 ids")
    refusal(eagle3(tmp_path / "ids", draft_vocab=120, **layers), "d2t leads to id 358, the model has 320")
    lacking = eagle3(tmp_path / "lacking", **layers)
    tensors = load_file(lacking / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, lacking / "model.safetensors")
    refusal(lacking, "no tensor fc.weight: of EAGLE heads only")
    save_file({k: v for k, v in tensors.items() if k != "norm.weight"}, lacking / "model.safetensors")
    refusal(lacking, "norm.weight does not exist")
