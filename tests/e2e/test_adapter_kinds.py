"""Adapters of experts, of routers and of DeepSeek's latents over HTTP: each with the tokens that PEFT gives, beside
requests for the base model, whose numbers are those of a server that knows no adapters, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter
from support.peft_adapters import assert_tokens_of_peft, peft_adapter
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NEW_TOKENS = 12
PROMPTS = ("The quick brown fox jumps over the lazy dog", "A cache keeps its keys")
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
ATTENTION = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

# What PEFT is to adapt, by the name of the adapter.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "experts": {"target_modules": ["v_proj"], "target_parameters": [UP, DOWN]},
        "down": {"target_modules": [], "target_parameters": [DOWN], "r": 3, "use_rslora": True},
        "router": {"target_modules": [], "target_parameters": ["mlp.gate.weight"], "r": 2},
    },
    "deepseek_v3": {
        "latents": {"target_modules": ["kv_b_proj"]},
        "all": {"target_modules": ATTENTION, "target_parameters": [UP, DOWN]},
    },
}
OPTIONS = ("--dtype", "float32", "--max-batch-prefill-tokens", "64")

# The checkpoint and the adapter on it that together give the tokens of a served adapter; None: of the base model.
References = Mapping[str | None, tuple[Path, Path | None]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("kinds") / request.param)


@pytest.fixture(scope="module")
def folders(model: Path) -> dict[str, Path]:
    kinds = enumerate(KINDS[model.name].items())
    made = {name: peft_adapter(model, model.parent / name, seed, **config) for seed, (name, config) in kinds}
    if model.name == "mixtral":
        place = "model.layers.{}.block_sparse_moe.experts.{}.{}"
        shapes = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}
        modules = {place.format(i, e, part): shapes[part] for i in range(4) for e in (0, 2, 3) for part in shapes}
        made["single"] = write_adapter(model.parent / "single", modules)
    return made


@pytest.fixture(scope="module")
def references(model: Path, folders: dict[str, Path]) -> References:
    found: dict[str | None, tuple[Path, Path | None]] = {None: (model, None)}
    found |= {name: (model, folder) for name, folder in folders.items()}
    if "single" in folders:  # transformers has no modules of single experts for PEFT to adapt: the sums as weights
        summed = tiny_checkpoint(model.name, model.parent / "summed")
        weights = load_file(summed / "model.safetensors")
        factors = load_file(folders["single"] / "adapter_model.safetensors")
        for key, a in factors.items():
            if key.endswith(".lora_A.weight"):
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += 2 * factors[key.replace("lora_A", "lora_B")] @ a
        save_file(weights, summed / "model.safetensors", {"format": "pt"})
        found["single"] = summed, None
    return found


@pytest.fixture(scope="module")
def client(model: Path, folders: dict[str, Path]) -> Iterator[httpx.Client]:
    listed = ",".join(f"{name}={folder}" for name, folder in folders.items())
    with (
        running_server(model, *OPTIONS, "--lora-adapters", listed) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


Tokens = list[tuple[int, float]]


def generated(client: httpx.Client, adapter: str | None, prompt: str) -> Tokens:
    """Ids and their log-probabilities."""
    parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos": True, "adapter_id": adapter}
    answer = client.post("/generate", json={"inputs": prompt, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    tokens = [(token["id"], token["logprob"]) for token in answer.json()["details"]["tokens"]]
    assert len(tokens) == NEW_TOKENS
    return tokens


def test_each_request_gets_its_own(client: httpx.Client, model: Path, references: References) -> None:
    with (
        running_server(model, *OPTIONS) as server,
        httpx.Client(base_url=server.url, timeout=60) as without,
    ):
        alone = {prompt: generated(without, None, prompt) for prompt in PROMPTS}
    # Alone on both servers: how many rows a step has changes the last bits of products that are torch's.
    assert {prompt: generated(client, None, prompt) for prompt in PROMPTS} == alone
    asked = [(name, prompt) for prompt in PROMPTS for name in (*references, None, *reversed(list(references)))]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: generated(client, *one), asked))
    for prompt in PROMPTS:
        ids = [token["id"] for token in client.post("/tokenize", json={"inputs": prompt}).json()]
        found: dict[str | None, set[tuple[int, ...]]] = {}
        for (name, of), tokens in zip(asked, answers, strict=True):
            if of == prompt:
                found.setdefault(name, set()).add(tuple(token for token, _ in tokens))
        for name, reference in references.items():
            for tokens in found[name]:  # several only where two tokens score alike
                assert_tokens_of_peft(*reference, ids, list(tokens))
        assert len(set().union(*found.values())) >= len(found)
