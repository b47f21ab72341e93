"""The launcher serves GGUF files, by their path or by their folder, with transformers' tokens."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from support.gguf_files import write_gguf
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROMPT, NEW = "The bytes come one by one", 12
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("mixture", "num_shards", "kinds"),
    [
        ("Q4_K_M", 1, ("6 bits, groups of 16", "4 bits, groups of 32 with offsets")),
        ("Q4_K_M", 2, ("6 bits, groups of 16", "4 bits, groups of 32 with offsets")),
        ("Q8_0", 1, ("8 bits, groups of 32",)),
    ],
)
def test_a_file_serves(mixture: str, num_shards: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source", **SIZES)
    (tmp_path / "files").mkdir()
    file = write_gguf(source, tmp_path / "files" / f"tiny-{mixture}.gguf", mixture, tmp_path / "decoded")
    by_folder = num_shards == 1 and mixture == "Q4_K_M"
    shards = ("--num-shard", str(num_shards)) if num_shards > 1 else ()
    cache = ("--huggingface-hub-cache", str(tmp_path / "cache"), "--dtype", "float32")
    with running_server(file.parent if by_folder else file, *shards, *cache) as server:
        address = f"http://127.0.0.1:{server.port}"
        parameters = {"max_new_tokens": NEW, "details": True}
        answer = httpx.post(f"{address}/generate", json={"inputs": PROMPT, "parameters": parameters}, timeout=60).json()
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        assert httpx.post(f"{address}/v1/chat/completions", json=chat, timeout=60).status_code == 200
        log = server.log()
    found = [token["id"] for token in answer["details"]["tokens"]]
    assert "Weights: gguf, " in log
    assert all(kind in log for kind in kinds)
    check_tokens(tmp_path / "decoded", found)


def test_experts_in_parts_serve_on_two_shards(tmp_path: Path) -> None:
    sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_intermediate_size": 256, "norm_topk_prob": True}
    source = tiny_checkpoint("qwen3_moe", tmp_path / "source", **SIZES, **sparse)
    file = write_gguf(source, tmp_path / "m.gguf", "Q4_K_M", tmp_path / "decoded", most_tensors=8)
    cache = ("--huggingface-hub-cache", str(tmp_path / "cache"), "--dtype", "float32")
    with running_server(file, "--num-shard", "2", *cache) as server:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NEW, "details": True}}
        answer = httpx.post(f"http://127.0.0.1:{server.port}/generate", json=body, timeout=60).json()
    check_tokens(tmp_path / "decoded", [token["id"] for token in answer["details"]["tokens"]])


def check_tokens(decoded: Path, found: list[int]) -> None:
    """Against what transformers makes of the numbers that the gguf library reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(decoded)(PROMPT, return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=NEW, min_new_tokens=len(found), do_sample=False)[0, ids.shape[1] :]
    assert len(found) > 3
    assert found == wanted.tolist()[: len(found)]
