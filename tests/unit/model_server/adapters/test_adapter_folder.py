"""Adapter folders: what is read of them, and the texts with which the rest is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import write_adapter

from model_server.adapters.folder import Adapter, read_adapter
from model_server.adapters.reader import AdapterReader
from model_server.errors import StartupError
from model_server.weights.matrix import Part
from model_server.weights.products import Product, Products

Q, HEAD = "model.layers.0.self_attn.q_proj", "lm_head"
TABLE = "model.embed_tokens"
TARGETS = Products(
    linear={Q: (16, 32), "model.layers.1.self_attn.q_proj": (16, 32), HEAD: (16, 100)},
    head=HEAD,
    embedding=TABLE,
    table=(100, 16),
    base="model.",
)


def read(directory: Path) -> Adapter:
    return read_adapter("mine", directory, TARGETS, ("model.",))


def refusal(directory: Path) -> str:
    with pytest.raises(StartupError) as caught:
        read(directory)
    text = str(caught.value)
    assert text.startswith("LoRA adapter `mine`: ") and "\n" not in text
    return text.removeprefix("LoRA adapter `mine`: ")


def test_pairs_ranks_and_scales(tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path, {Q: (16, 32), HEAD: (16, 100)}, lora_alpha=16, base_model_name_or_path="b"))
    assert set(adapter.pairs) == {Q, HEAD}
    assert (adapter.rank, adapter.base, adapter.pairs[Q].scale) == (4, "b", 4.0)
    with adapter.open() as reader:
        assert reader.rows(adapter.pairs[HEAD].b, [(10, 12)]).shape == (2, 4)


def test_rank_stabilized_scale(tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path, {Q: (16, 32)}, lora_alpha=16, use_rslora=True))
    assert adapter.pairs[Q].scale == 16 / math.sqrt(4)


def test_patterns_match_the_end_of_a_module_from_a_dot_on(tmp_path: Path) -> None:
    second = "base_model.model.model.layers.1.self_attn.q_proj"
    wider = {f"{second}.lora_A.weight": torch.ones(2, 16), f"{second}.lora_B.weight": torch.ones(32, 2)}
    patterns = {"proj": 7, r"layers\.1\..*q_proj": 2}
    adapter = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors=wider, rank_pattern=patterns, alpha_pattern={Q: 1}))
    assert adapter.pairs[Q].rank == 4 and adapter.pairs[Q].scale == 0.25
    assert adapter.pairs["model.layers.1.self_attn.q_proj"].rank == 2


def test_folders_with_the_same_shapes_and_config_are_interpreted_once(tmp_path: Path) -> None:
    """1,000 registered adapters of a model take a fifth of a second, not five. What differs is still seen."""
    two = {Q: (16, 32), "model.layers.1.self_attn.q_proj": (16, 32)}
    patterns = {"q_proj": 8, Q: 2}
    first, same = (
        read(write_adapter(tmp_path / name, two, alpha_pattern=patterns, base_model_name_or_path="b")) for name in "ab"
    )
    assert same.pairs is first.pairs and same.headers.keys() != first.headers.keys()
    other = read(write_adapter(tmp_path / "c", two, alpha_pattern=dict(reversed(patterns.items()))))
    assert (first.pairs[Q].scale, other.pairs[Q].scale) == (2.0, 0.5), "the first pattern that matches decides"
    narrow = dataclasses.replace(TARGETS, linear={Q: (16, 32)})
    with pytest.raises(StartupError, match="belongs to no layer"):
        read_adapter("mine", tmp_path / "a", narrow, ("model.",))
    file = tmp_path / "b" / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert f"{file} is damaged or incomplete: the file is cut short" in refusal(tmp_path / "b")


def test_modules_without_the_base_prefix(tmp_path: Path) -> None:
    assert set(read(write_adapter(tmp_path, {"layers.0.self_attn.q_proj": (16, 32)})).pairs) == {Q}


@pytest.mark.parametrize("base", ["language_model.model.", "model.language_model.", "model."])
def test_modules_under_other_names_of_a_vision_model(base: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {base + "layers.0.self_attn.q_proj": (16, 32)})
    bases = ("model.", "model.language_model.", "language_model.model.", "model.")
    assert set(read_adapter("mine", folder, TARGETS, bases).pairs) == {Q}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"peft_type": "IA3"}, "`peft_type` is 'IA3'; only LORA is served"),
        ({"task_type": "SEQ_CLS"}, "`task_type` is 'SEQ_CLS'; only CAUSAL_LM is served"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights` 'pissa_niter_4' changes the base model; convert"),
        ({"use_qalora": True}, "`use_qalora` is not served; merge the adapter into the model"),
        ({"trainable_token_indices": [1, 1]}, "adapter_config.json: `trainable_token_indices` must be a list of diff"),
        ({"trainable_token_indices": {"lm_head": ["a"]}}, "adapter_config.json: `trainable_token_indices` must be a l"),
        ({"layer_replication": [[0, 1]]}, "`layer_replication` is not served; merge the adapter into the model"),
        ({"from_the_future": 1}, "`from_the_future` is not served; merge the adapter into the model"),
        ({"r": 8}, f"tensor base_model.model.{Q}.lora_A.weight has shape [4, 16]; [8, 16] is expected"),
        ({"r": 0}, "adapter_config.json: `r` is 0; a whole number from 1 to 256 is expected"),
        ({"r": 10**400}, "adapter_config.json: `r` is 1000"),
        ({"lora_alpha": "16"}, "adapter_config.json: `lora_alpha` is '16'; a number is expected"),
        ({"rank_pattern": {"(a+)+b": 4}}, "adapter_config.json: `rank_pattern` has the pattern '(a+)+b', which is too"),
        ({"rank_pattern": {".*.*.*x": 4}}, "adapter_config.json: `rank_pattern` has the pattern '.*.*.*x', which is"),
        (
            {"rank_pattern": {"(m|.)" * 15: 4}},
            "adapter_config.json: `rank_pattern` is too complex from the pattern '(m",
        ),
        (
            {"alpha_pattern": {f".*.*[|(]{number}\\|": 4 for number in range(79)}},
            "adapter_config.json: `alpha_pattern` is too complex from the pattern '.*.*[|(]78",
        ),
        ({"rank_pattern": {"a|b" * 9000: 4}}, "adapter_config.json: `rank_pattern` has the pattern 'a|ba|"),
        ({"lora_alpha": float("inf")}, "adapter_config.json: `lora_alpha` is inf; a number is expected"),
        ({"lora_alpha": float("nan")}, "adapter_config.json: `lora_alpha` is nan; a number is expected"),
        ({"use_rslora": "true"}, "adapter_config.json: `use_rslora` is 'true'; true or false is expected"),
        ({"use_rslora": 1}, "adapter_config.json: `use_rslora` is 1; true or false is expected"),
        ({"new\nline\x1b[31m": 1}, "`new?line?[31m` is not served; merge the adapter into the model"),
        ({"alpha_pattern": {"(": 4}}, "adapter_config.json: `alpha_pattern` has the invalid pattern '('"),
        ({"alpha_pattern": []}, "adapter_config.json: `alpha_pattern` must be an object with at most 4096 entries"),
    ],
)
def test_what_the_config_may_not_say(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    assert refusal(write_adapter(tmp_path, {Q: (16, 32)}, **fields)).startswith(text)


@pytest.mark.parametrize("start", ["gaussian", True, None, "eva"])
def test_initial_values_that_keep_the_base_model(tmp_path: Path, start: object) -> None:
    read(write_adapter(tmp_path, {Q: (16, 32)}, init_lora_weights=start))


def test_every_tensor_belongs_to_a_layer(tmp_path: Path) -> None:
    for key in (
        "base_model.model.q.lora_magnitude_vector",
        f"base_model.model.{Q}.weight",
        f"base_model.model.{Q}.bias",
        "base_model.model.model.norm.weight",
        f"{Q}.weight",
    ):
        write_adapter(tmp_path, {Q: (16, 32)}, tensors={key: torch.ones(32)})
        assert refusal(tmp_path) == f"tensor {key} belongs to no layer that takes adapters"
    write_adapter(tmp_path, {"model.layers.7.self_attn.q_proj": (16, 32)})
    assert refusal(tmp_path).endswith("layers.7.self_attn.q_proj.lora_A.weight belongs to no layer that takes adapters")


def test_lengths_of_rows_that_the_config_asks_for(tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (16, 32)}, use_dora=True)
    key = f"base_model.model.{Q}.lora_magnitude_vector"
    assert refusal(tmp_path) == f"tensor {key} is missing, which `use_dora` asks for"
    write_adapter(tmp_path, {Q: (16, 32)}, use_dora=True, tensors={key: torch.ones(32)})
    read(tmp_path)


def test_a_matrix_without_the_other(tmp_path: Path) -> None:
    write_adapter(tmp_path, {}, tensors={f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 16)})
    assert refusal(tmp_path).startswith(f"tensor base_model.model.{Q}.lora_B.weight is missing beside ")


def test_what_the_tensors_of_embedding_and_head_are(tmp_path: Path) -> None:
    table = "base_model.model.model.embed_tokens"
    factors = {f"{table}.lora_embedding_A": torch.ones(4, 100), f"{table}.lora_embedding_B": torch.ones(16, 4)}
    rows = {f"{table}.token_adapter.trainable_tokens_delta": torch.ones(2, 16)}
    adapter = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors=factors | rows, trainable_token_indices=[99, 3]))
    assert adapter.pairs[TABLE].a == f"{table}.lora_embedding_A" and adapter.rows[TABLE].ids == (99, 3)
    write_adapter(tmp_path, {}, tensors=rows, trainable_token_indices={"embed_tokens": [100, 3]})
    assert refusal(tmp_path) == "`trainable_token_indices` names token 100; the model has 100"
    write_adapter(tmp_path, {}, tensors=rows, trainable_token_indices={"lm_head": [1, 3]})
    assert refusal(tmp_path) == "`trainable_token_indices` names no tokens for model.embed_tokens"
    write_adapter(tmp_path, {}, tensors=rows, trainable_token_indices=[1])
    assert refusal(tmp_path).endswith("has shape [2, 16]; [1, 16] is expected")
    both = rows | {f"{table}.weight": torch.ones(100, 16)}
    assert refusal(write_adapter(tmp_path, {}, tensors=both, trainable_token_indices=[1, 2])).endswith("is not served")
    lengths = factors | rows | {f"{table}.lora_magnitude_vector": torch.ones(16)}
    write_adapter(tmp_path, {}, tensors=lengths, trainable_token_indices=[1, 2])
    assert refusal(tmp_path).endswith("beside new rows or a bias of its module is not served")


def test_lengths_of_rows_that_are_all_0(tmp_path: Path) -> None:
    key = f"base_model.model.{Q}.lora_magnitude_vector"
    adapter = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors={key: torch.ones(32)}))
    assert adapter.pairs[Q].magnitude == key
    zeros = {f"base_model.model.{Q}.lora_B.weight": torch.zeros(32, 4)}
    adapter = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors={key: torch.ones(32)} | zeros))
    product = Product(parts=(Part(Q, ((0, 32),), 32),), columns=None, weight=lambda: torch.zeros(32, 16), bias=None)
    with adapter.open() as opened, pytest.raises(StartupError, match="gives a length to rows that are all 0"):
        AdapterReader(adapter, opened, torch.float32, torch.device("cpu")).product(product)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    ints = {f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 16, dtype=torch.int64)}
    assert "is stored as I64" in refusal(write_adapter(tmp_path, {Q: (16, 32)}, tensors=ints))


def test_folders_that_are_no_adapters(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"no adapter_config.json in {tmp_path} (found: nothing)"
    write_adapter(tmp_path, {Q: (16, 32)})
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert refusal(tmp_path) == (
        "adapter_model.bin is pickled; convert it once with `model-server download-weights MODEL --lora-adapters "
        f"{tmp_path} --auto-convert`"
    )
    (tmp_path / "adapter_model.bin").unlink()
    assert refusal(tmp_path) == f"no *.safetensors in {tmp_path} (found: adapter_config.json)"
    write_adapter(tmp_path, {})
    assert refusal(tmp_path) == "there are no tensors in it"


def test_a_damaged_file_and_a_tensor_in_two(tmp_path: Path) -> None:
    file = write_adapter(tmp_path, {Q: (16, 32)}) / "adapter_model.safetensors"
    shutil.copy(file, tmp_path / "other.safetensors")
    assert "is in more than one file, also in other.safetensors" in refusal(tmp_path)
    (tmp_path / "other.safetensors").unlink()
    file.write_bytes(file.read_bytes()[:-1])
    assert "is damaged or incomplete: the file is cut short" in refusal(tmp_path)
    file.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    assert "the header claims" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"peft_type": "LORA", "r": 4, "r": 8}', r"has shape \[4, 16\]; \[8, 16\] is expected"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "`lora_alpha` is nan; a number is expected"),
        ('{"peft_type": ' + "[" * 100_000, "is not valid JSON"),
        ('{"r": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("\x00", "is not valid JSON"),
    ],
)
def test_configs_that_are_no_usual_json(text: str, message: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (16, 32)})
    (tmp_path / "adapter_config.json").write_text(text)
    said = refusal(tmp_path)
    assert re.search(message, said) and said.isprintable()


def test_thousands_of_odd_tensors(tmp_path: Path) -> None:
    """The first is named, in one line."""
    names = [f"{number}\n\x1b[31m" + "x" * 500 for number in range(10_000)]
    entries = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    header = json.dumps(entries).encode()
    write_adapter(tmp_path, {Q: (16, 32)})
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(40_000))
    said = refusal(tmp_path)
    assert said.startswith("tensor 0??[31mx") and said.isprintable() and len(said) < 300


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    """None of them is waited for."""
    makes: list[Callable[[Path], object]] = [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("gone"),
        lambda path: path.symlink_to(name),
        lambda path: path.symlink_to("/dev/zero"),
    ]
    for number, make in enumerate(makes):
        folder = write_adapter(tmp_path / str(number), {Q: (16, 32)})
        (folder / name).unlink()
        make(folder / name)
        assert name in refusal(folder)


def test_links_out_of_the_folder(tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", {Q: (16, 32)})
    inside = write_adapter(tmp_path / "inside", {Q: (16, 32)})
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (inside / name).unlink()
        (inside / name).symlink_to(outside / name)
        assert refusal(inside) == f"{inside / name} is a link that leads out of the folder"
        (inside / name).unlink()
        shutil.copy(outside / name, inside / name)
    read(inside)


def test_snapshots_of_the_hub_cache_are_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = write_adapter(tmp_path / "snapshots" / "abc", {Q: (16, 32)}), tmp_path / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    read(snapshot)


def test_a_config_that_is_too_large(tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (16, 32)}, revision="x" * 2**20)
    assert refusal(tmp_path) == f"{tmp_path / 'adapter_config.json'} is larger than 1 MiB"
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    assert refusal(tmp_path).endswith("does not hold a JSON object")


def test_a_copy_of_a_matrix_that_the_adapter_does_not_change(tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (16, 32)}, tensors={"base_model.model.lm_head.base_layer.weight": torch.ones(100, 16)})
    assert "lm_head.lora_A.weight is missing beside base_model.model.lm_head.base_layer.weight" in refusal(tmp_path)
    copy = f"base_model.model.{Q}.base_layer.weight"
    write_adapter(tmp_path, {Q: (16, 32)}, tensors={copy: torch.ones(32, 16)})
    assert refusal(tmp_path) == f"tensor {copy} belongs to no layer that takes adapters"


@pytest.mark.parametrize("infix", ["modules_to_save", "modules_to_save.default"])
def test_saved_modules_by_the_names_of_training(infix: str, tmp_path: Path) -> None:
    saved, original = (f"base_model.model.lm_head.{name}.weight" for name in (infix, "original_module"))
    tensors = {saved: torch.ones(100, 16), original: torch.zeros(100, 16)}
    adapter = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors=tensors))
    assert adapter.rows[HEAD].key == saved and adapter.originals == {original}
    without = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors={saved: torch.ones(100, 16)}))
    assert adapter.num_kept == without.num_kept
    plain = "base_model.model.lm_head.weight"  # what PEFT reads where all three are there
    three = read(write_adapter(tmp_path, {Q: (16, 32)}, tensors={**tensors, plain: torch.ones(100, 16)}))
    assert three.rows[HEAD].key == plain and three.originals == {original, saved}
    assert three.num_kept == without.num_kept
    twice = {f"base_model.model.lm_head.{name}.weight" for name in ("modules_to_save", "modules_to_save.default")}
    write_adapter(tmp_path, {Q: (16, 32)}, tensors={name: torch.ones(100, 16) for name in twice})
    assert "is the same as base_model.model.lm_head" in refusal(tmp_path)
    write_adapter(tmp_path, {Q: (16, 32)}, tensors={original: torch.zeros(101, 16)})
    assert refusal(tmp_path) == f"tensor {original} has shape [101, 16]; [100, 16] is expected"
