"""MTP layers: drafts are those of the formulas, written on transformers' own layer; and no token is another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.drafted_shard import check_two_ranks, drafter_of, ids_of, shard_of
from support.engine_shard import generations_of, mixed_requests
from support.loading import load
from support.tiny_drafters import with_mtp
from support.tiny_models import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_server.errors import StartupError
from model_server.text.tokenizer import Tokenizer

KINDS = ("deepseek_v3", "deepseek_v32", "llama")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Reference:
    """transformers' model, and its next layer as the MTP layer, over all positions at once."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().model
        larger = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval().model
        self.number = self.model.config.num_hidden_layers
        self.layer, self.rotary = larger.layers[self.number], larger.rotary_emb
        self.tensors = load_file(folder / "model.safetensors")
        self.eps = self.model.config.rms_norm_eps

    def tensor(self, name: str) -> Tensor:
        return self.tensors[f"model.layers.{self.number}.{name}.weight"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.tensor(name)

    def forward(self, ids: list[int], states: Tensor) -> Tensor:
        embedded = self.tensor("embed_tokens")[ids]
        embedded[0] = 0
        mixed = torch.cat([self.norm("enorm", embedded), self.norm("hnorm", states)], -1) @ self.tensor("eh_proj").T
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        out = self.layer(
            mixed[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(mixed[None], positions),
        )
        return self.norm("shared_head.norm", out[0])

    def draft(self, ids: list[int], forced: list[int], most: int) -> list[int]:
        states = self.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        tokens, found = list(ids[1:]), list[int]()
        for place in range(len(forced) + most):
            out = self.forward(tokens, states)[-1:]
            best = int((out @ self.tensor("shared_head.head").T).argmax())
            found.append(forced[place] if place < len(forced) else best)
            tokens.append(found[-1])
            states = torch.cat([states, out])
        return found[len(forced) :]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(the checkpoint with one layer more, the same with this as MTP layer)."""
    root = tmp_path_factory.mktemp("mtp")
    made = {}
    for kind in KINDS:
        whole = tiny_checkpoint(kind, root / f"{kind}-whole", num_hidden_layers=3, vocab_size=320)
        shutil.copytree(whole, root / kind)
        made[kind] = (whole, with_mtp(root / kind, copies_head=kind == "llama"))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas_and_tokens_those_without(
    kind: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    whole, folder = folders[kind]
    tokenizer = Tokenizer.load(folder)
    plain, _ = shard_of(tokenizer, folder, None)
    wanted = generations_of(*plain.run_out(plain.prefill(0, *mixed_requests(plain, tokenizer)), 0))
    shard, asked = shard_of(tokenizer, folder, "mtp")
    found = generations_of(*shard.run_out(shard.prefill(0, *mixed_requests(shard, tokenizer)), 0))
    assert ids_of(found) == ids_of(wanted)
    reference = Reference(whole, folder)
    assert len(asked) > 40
    for ids, forced, draft in asked[::2]:
        assert draft == reference.draft(ids, forced, len(draft))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_draft_and_say_what_one_does(kind: str, folders: dict[str, tuple[Path, Path]]) -> None:
    _, folder = folders[kind]
    check_two_ranks(Tokenizer.load(folder), folder, "mtp")


def test_a_model_without_such_a_layer_is_refused(folders: dict[str, tuple[Path, Path]]) -> None:
    whole, _ = folders["llama"]
    with pytest.raises(
        StartupError, match=r"^--speculator mtp: the model has no layer for multi-token prediction \(no "
    ):
        drafter_of("mtp", whole, load(whole), Tokenizer.load(whole))
