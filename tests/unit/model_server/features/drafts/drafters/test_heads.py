"""Medusa heads and MLP speculators: what they guess is what their formulas say, and no token is another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.drafted_shard import Asked, note_drafts
from support.drafts import drafts_in, use_drafts
from support.engine_shard import BLOCK, EngineShard, generations_of, mixed_requests
from support.loading import CPU, load
from support.meeting_ranks import on_ranks
from support.tiny_drafters import medusa, mlp_speculator
from support.tiny_models import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.drafters.drafter import DraftedRunner
from model_server.features.drafts.drafters.heads import Heads
from model_server.features.drafts.load import find_speculator, load_drafter
from model_server.features.drafts.pace import Pace
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from wire.step_phases import DraftKind

FREE, CHEAP = Pace([(1, 1.0)]), Pace([(1, 0.001)])
VOCAB, HIDDEN = 320, 64


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("heads") / "base", num_hidden_layers=2, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Tokenizer:
    return Tokenizer.load(base)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {
        "medusa 1": medusa(root / "medusa1"),
        "medusa 2": medusa(root / "medusa2", version=2),
        "mlp": mlp_speculator(root / "mlp"),
        "mlp tied": mlp_speculator(root / "tied", tied=True, scales_input=True, number=4),
        "fitted": medusa(root / "fitted", layers=1, heads=fitted_heads(base, Tokenizer.load(base))),
    }


def fitted_heads(base: Path, tokenizer: Tokenizer) -> list[Tensor]:
    """Matrices that are often right about what the mixed requests say: least squares over these very texts."""
    model = AutoModelForCausalLM.from_pretrained(base)
    shard = EngineShard(tokenizer, budget=1000, runner=load(base))  # type: ignore[arg-type]
    texts = [[*prompt, *ids] for prompt, ids in zip(*plain(shard, tokenizer), strict=True)]
    hidden, after = [], []
    for ids in texts:
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        for place in range(len(ids) - 6):
            hidden.append(states[place])
            after.append(ids[place + 2 : place + 6])
    inverse = torch.linalg.pinv(torch.stack(hidden), rtol=1e-3)
    return [(inverse @ F.one_hot(torch.tensor(after)[:, head], VOCAB).float()).T for head in range(4)]


def plain(shard: EngineShard, tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    requests = mixed_requests(shard, tokenizer)
    found = generations_of(*shard.run_out(shard.prefill(0, *requests), 0))
    ids = [[i for g in found[one.id] if g.tokens is not None for i in g.tokens.ids] for one in requests]
    return [shard.prompts[one.id] for one in requests], ids


def drafter_of(
    folder: Path, base: Path, runner: Runner, tokenizer: Tokenizer, number: int | None = None,
    group: ProcessGroup | None = None,
) -> Heads:  # fmt: skip
    found = find_speculator(str(folder), tokenizer, folder)
    assert found.heads is not None
    placement = Placement(CPU, torch.float32, Ranks.of(group or ProcessGroup()))
    made = load_drafter(
        found, number or found.heads.number, describe(examine(base)), runner, tokenizer.vocab_size, placement,
        AttentionChoice("reference", CPU),
    )  # fmt: skip
    assert isinstance(made, Heads)
    return made


def reference(folder: Path, base: Path, hidden: Tensor, newest: int, forced: list[int], most: int) -> list[int]:
    """Written from the formulas, in float32, for one row."""
    config = json.loads((folder / "config.json").read_text())
    if "medusa_num_heads" not in config:
        return mlp_reference(config, load_file(folder / "model.safetensors"), hidden, newest, forced, most)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    layers = config["medusa_num_layers"]
    lm_head = load_file(base / "model.safetensors")["lm_head.weight"]
    found = []
    for head in range(most):
        x = hidden
        for layer in range(layers):
            product = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + product * torch.sigmoid(product)
        found.append(int((tensors.get(f"{head}.{layers}.weight", lm_head) @ x).argmax()))
    return found


def mlp_reference(
    config: dict[str, Any], tensors: dict[str, Tensor], hidden: Tensor, newest: int, forced: list[int], most: int
) -> list[int]:
    number, inner, tied = config["n_predict"], config["inner_dim"], config["tie_weights"]
    a = 0.5 ** (0.5 / number)
    b = math.sqrt(1 - a * a) * math.sqrt(inner / 2)
    state = hidden / hidden.pow(2).mean().sqrt() / math.sqrt(2) if config["scale_input"] else hidden
    found: list[int] = []
    for place in range(most):
        own = 0 if tied else place
        token = newest if not place else forced[place - 1] if place <= len(forced) else found[-1]
        projection = tensors[f"speculator.proj.{min(place, 1) if tied else place}.weight"]
        state = projection @ state * a + tensors[f"speculator.emb.{own}.weight"][token] * b
        state = state / (state.pow(2).mean() + 1e-6).sqrt()
        state = state * tensors[f"speculator.ln.{own}.weight"] + tensors[f"speculator.ln.{own}.bias"]
        state = 0.5 * state * (1 + torch.erf(state / math.sqrt(2)))
        found.append(int((tensors[f"speculator.head.{own}.weight"] @ state).argmax()))
    return found


def shard_of(
    tokenizer: Tokenizer, base: Path, folder: Path | None, group: ProcessGroup | None = None, **options: Any
) -> tuple[EngineShard, Heads | None]:
    runner: Any = load(base, group=group)
    rank = {} if group is None else {"rank": group.rank, "world_size": group.size}
    if folder is None:
        return EngineShard(tokenizer, budget=1000, runner=runner, **rank, **options), None
    drafter = drafter_of(folder, base, runner, tokenizer, group=group)
    whole: Any = DraftedRunner(runner, drafter)
    shard = EngineShard(tokenizer, budget=1000, runner=whole, **rank, **options)
    speculator = DeviceModelSpeculator(drafter._number, 128, CPU, BLOCK, drafter, alone=group is None)
    speculator.pace, drafter.pace = FREE, CHEAP
    use_drafts(shard.engine, speculator)
    return shard, drafter


@pytest.mark.parametrize("kind", ["medusa 1", "medusa 2", "mlp", "mlp tied"])
def test_guesses_are_those_of_the_formulas(
    kind: str, folders: dict[str, Path], base: Path, tokenizer: Tokenizer
) -> None:
    """From the hidden state behind which the newest token was drawn, after prompts, plain steps and windows, with
    tokens of grammars before the first guess."""
    shard, drafter = shard_of(tokenizer, base, folders[kind])
    assert drafter is not None
    asked = note_drafts(drafter)
    requests = mixed_requests(shard, tokenizer)
    results = shard.run_out(shard.prefill(0, *requests), 0)
    assert results and len(asked) > 40
    model = AutoModelForCausalLM.from_pretrained(base)
    for ids, forced, found in asked:
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0][-2]
        most = len(forced) + len(found)
        assert found == reference(folders[kind], base, hidden, ids[-1], forced, most)[len(forced) :]


@pytest.mark.parametrize("kind", ["medusa 1", "medusa 2", "mlp", "mlp tied", "fitted"])
def test_each_kind_of_request_says_what_it_says_without(
    kind: str, folders: dict[str, Path], base: Path, tokenizer: Tokenizer
) -> None:
    def said(folder: Path | None) -> tuple[Any, list[float], int]:
        shard, _ = shard_of(tokenizer, base, folder)
        requests = mixed_requests(shard, tokenizer)
        results = shard.run_out(shard.prefill(0, *requests), 0)
        found = generations_of(*results)
        ids = [[i for g in found[one.id] if g.tokens is not None for i in g.tokens.ids] for one in requests]
        logprobs = [v for one in requests for g in found[one.id] if g.tokens for v in g.tokens.logprobs]
        right = sum(one.right[DraftKind.MODEL] for one in drafts_in(results))
        return (ids, [found[one.id][-1].generated_text for one in requests]), logprobs, right

    wanted, wanted_logprobs, _ = said(None)
    found, logprobs, right = said(folders[kind])
    assert found == wanted
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)
    assert right > 15 or kind != "fitted"


@pytest.mark.parametrize("kind", ["medusa 1", "medusa 2", "mlp tied", "fitted"])
def test_two_ranks_guess_and_say_what_one_does(
    kind: str, folders: dict[str, Path], base: Path, tokenizer: Tokenizer
) -> None:
    def work(group: ProcessGroup) -> tuple[dict[int, list[int]], list[Asked]]:
        shard, drafter = shard_of(tokenizer, base, folders[kind], group if group.size > 1 else None)
        assert drafter is not None
        drafts = note_drafts(drafter)
        requests = [shard.request([5 + i, 6, 7, 8], 12) for i in range(3)]
        results = [shard.prefill(0, *requests)]
        while results[-1].batch is not None:
            results.append(shard.decode(0))
        found = generations_of(*results)
        return {key: [i for g in rows if g.tokens for i in g.tokens.ids] for key, rows in found.items()}, drafts

    alone, drafts = work(ProcessGroup())
    ranks = on_ranks(2, work)
    assert ranks[0][0] | ranks[1][0] == alone
    assert ranks[0][1] == ranks[1][1] == drafts


def test_a_draft_is_at_most_as_long_as_asked(folders: dict[str, Path], base: Path, tokenizer: Tokenizer) -> None:
    runner = load(base)
    drafter = drafter_of(folders["medusa 1"], base, runner, tokenizer, number=2)
    assert drafter.guesser.guess(torch.randn(3, HIDDEN), torch.tensor([1, 2, 3]), None, 2).shape == (3, 2)
    drafter.measure(None, ProcessGroup())  # type: ignore[arg-type]
    assert drafter.pace is not None and drafter.pace.cost(1) > 0


def test_what_does_not_fit_is_refused(tmp_path: Path, base: Path, tokenizer: Tokenizer) -> None:
    runner = load(base)

    def refusal(folder: Path, words: str) -> None:
        with pytest.raises(StartupError, match=rf"^--speculator {folder}: .*{words}"):
            drafter_of(folder, base, runner, tokenizer)

    refusal(medusa(tmp_path / "wide", hidden=32), r"0\.0\.linear\.weight has shape \[32, 32\].* 64")
    refusal(medusa(tmp_path / "vocab", vocab=400), r"0\.2\.weight has 400 rows, the model 320 ids")
    refusal(mlp_speculator(tmp_path / "mlp", hidden=32), r"speculator\.proj\.0\.weight has shape \[48, 32\].* 64")
    pickled = medusa(tmp_path / "pickled")
    (pickled / "medusa_lm_head.safetensors").rename(pickled / "medusa_lm_head.pt")
    refusal(pickled, r"medusa_lm_head\.pt, which is pickled, and no medusa_lm_head\.safetensors")
    (pickled / "medusa_lm_head.pt").unlink()
    refusal(pickled, r"no medusa_lm_head\.safetensors")
    lacking = medusa(tmp_path / "lacking")
    tensors = load_file(lacking / "medusa_lm_head.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("3.")}, lacking / "medusa_lm_head.safetensors")
    refusal(lacking, r"3\.0\.linear")
    for number in (0, -1, "4", True):
        folder = medusa(tmp_path / f"number {number}")
        (folder / "config.json").write_text(json.dumps({"medusa_num_heads": number}))
        refusal(folder, r"`medusa_num_heads` is .*; it must be a number of heads")
    other = tiny_checkpoint("llama", tmp_path / "eagle", with_tokenizer=False)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["EagleLlamaForCausalLM"]}))
    refusal(other, "architecture EagleLlamaForCausalLM are not served")
