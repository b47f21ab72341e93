"""Tensors of a checkpoint that nothing reads, by either runner; heads that are the embedding, or are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.loading import load
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from support.tiny_types import type_checkpoint
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Axis, Layout, Ranks
from model_server.errors import StartupError
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.weights.checkpoint import examine
from model_server.weights.leftover import natural_order

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("native"), with_tokenizer=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library")
    type_checkpoint("arcee", path)
    return path


@pytest.fixture(params=["native", "library"])
def source(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def changed(source: Path, folder: Path, change: Callable[[Tensors], object], **fields: object) -> Path:
    """A copy of a checkpoint with other tensors, and with these fields in its config."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def same_logits(folder: Path, source: Path) -> Runner:
    runner, sequences = load(folder), prompts(256)
    assert_equal_logits(run_protocol(runner, sequences, 4), run_protocol(load(source), sequences, 4))
    return runner


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight_scale_inv",
        "model.layers.1.self_attn.o_norm.weight",
        "model.norm.bias",
        "score.weight",
        "layers.2.mlp.up_proj.weight",  # a second name of a tensor that is there
    ],
)
def test_a_tensor_that_nothing_reads_ends_the_start(name: str, source: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[name] = tensors.get(f"model.{name}", torch.ones(64)).clone()

    folder = changed(source, tmp_path / "m", add)
    with pytest.raises(StartupError) as refused:
        load(folder)
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    assert str(refused.value) == (
        f"weight {name} is in the files, but nothing of {model_type} as config.json describes it reads it: give the "
        "files that belong to this config.json, or remove from them what is not the model's"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_that_the_heads_of_a_family_lack_ends_the_start(tied: bool, native: Path, tmp_path: Path) -> None:
    """transformers leaves it out: with it the logits would be others."""

    def add(tensors: Tensors) -> None:
        tensors["lm_head.bias"] = torch.linspace(-1, 1, len(tensors["model.embed_tokens.weight"]))

    with pytest.raises(StartupError, match=r"^weight lm_head\.bias is in the files, but the head of this model has no"):
        load(changed(native, tmp_path / "m", add, tie_word_embeddings=tied))


def test_a_bias_of_zeros_changes_nothing(native: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.bias"] = torch.zeros(len(tensors["model.embed_tokens.weight"]))

    same_logits(changed(native, tmp_path / "m", add), native)


@pytest.mark.parametrize("model_type", ["phi", "gptj", "phimoe"])
def test_a_bias_that_the_head_of_the_family_has_is_added(model_type: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(model_type, tmp_path / "source", with_tokenizer=False)
    biases = []

    def of_zeros(tensors: Tensors) -> None:
        biases.append(tensors["lm_head.bias"].clone())
        tensors["lm_head.bias"].zero_()

    without = load(changed(source, tmp_path / "m", of_zeros))
    assert biases[0].any()
    sequences = prompts(256)
    found = [one + biases[0] for one in run_protocol(without, sequences, 4)]
    assert_equal_logits(run_protocol(load(source), sequences, 4), found)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_numbers_of_other_types_without_scales_end_the_start(dtype: torch.dtype, library: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].mul(10).to(dtype)

    with pytest.raises(StartupError, match=rf"^weight {name} is stored as \w+, in no format that this version serves$"):
        load(changed(library, tmp_path / "m", change))


def test_of_several_the_first_is_named_and_the_others_counted(source: Path, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.extra" for layer in (3, 2, 1)]
    folder = changed(source, tmp_path / "m", lambda tensors: tensors.update({n: torch.ones(1) for n in names}))
    with pytest.raises(StartupError, match=r"^weight model\.layers\.1\.extra is .* reads it, nor 2 others: give"):
        load(folder)


def test_layers_are_ordered_by_their_numbers() -> None:
    assert sorted(["a.10.b", "a.9.c", "a.9.b", "a.b"], key=natural_order) == ["a.9.b", "a.9.c", "a.10.b", "a.b"]


def test_what_is_known_to_be_left_over(source: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        for end in ("k_scale", "v_scale", "attn.k_scale", "k_proj.output_scale", "q_scale"):
            tensors[f"model.layers.0.self_attn.{end}"] = torch.ones(1)

    same_logits(changed(source, tmp_path / "m", add), source)


def test_masks_of_older_files(tmp_path: Path) -> None:
    plain = tiny_checkpoint("gpt2", tmp_path / "plain", with_tokenizer=False)

    def add(tensors: Tensors) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        tensors["transformer.h.3.attn.masked_bias"] = torch.ones(())

    same_logits(changed(plain, tmp_path / "m", add), plain)


def test_layers_behind_those_of_the_config_are_warned_of(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Models are cut by changing their config."""

    def cut(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(("model.layers.2.", "model.layers.3."))]:
            del tensors[name]

    short = changed(source, tmp_path / "short", cut, num_hidden_layers=2)
    caplog.clear()
    same_logits(changed(source, tmp_path / "m", lambda tensors: None, num_hidden_layers=2), short)
    warning = "The files hold more layers than config.json has: 2 layers are left out, from number 2 on"
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [warning]


def test_layers_that_draft_are_not_warned_of(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.4.eh_proj.weight"] = torch.ones(64, 128)
        tensors["model.layers.4.mlp.up_proj.weight"] = torch.ones(96, 64)

    same_logits(changed(source, tmp_path / "m", add), source)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_more_experts_than_the_config_has(tmp_path: Path) -> None:
    plain = tiny_checkpoint("mixtral", tmp_path / "plain", with_tokenizer=False)

    def cut_router(tensors: Tensors) -> None:
        for layer in range(4):
            name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
            tensors[name] = tensors[name][:3]

    folder = changed(plain, tmp_path / "m", cut_router, num_local_experts=3)
    with pytest.raises(
        StartupError, match=r"^weight model\.layers\.0\.block_sparse_moe\.experts\.3\.w1\.weight is .* 11 others"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (520, 64)),
        ("model.norm.weight", (65,)),
        ("model.layers.0.mlp.down_proj.weight", (64, 97)),
    ],
)
def test_tensors_that_are_larger_than_the_config_says(
    name: str, shape: tuple[int, ...], native: Path, tmp_path: Path
) -> None:
    folder = changed(native, tmp_path / "m", lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(StartupError, match=rf"^weight {name} has shape .*; the config asks for"):
        load(folder)


def test_each_stage_reads_its_own(native: Path, tmp_path: Path) -> None:
    folder = changed(native, tmp_path / "m", lambda tensors: tensors.update({"model.norm.bias": torch.ones(64)}))
    for path, refused in ((native, None), (folder, "weight model.norm.bias is in the files")):
        errors = []
        for rank in range(2):
            try:
                load(path, ranks=Ranks(Layout(stage=Axis(rank, 2)), ProcessGroup(), ProcessGroup()))
            except StartupError as error:
                errors.append(str(error))
        assert len(errors) == (refused is not None) and all(error.startswith(refused or "") for error in errors)


@pytest.mark.parametrize(
    ("model_type", "variant"), [("stablelm", "parallel"), ("cohere", "qk_norm"), ("gpt_oss", "plain")]
)
def test_each_rank_leaves_the_heads_of_the_others_to_them(model_type: str, variant: str, tmp_path: Path) -> None:
    plain = tiny_checkpoint(model_type, tmp_path / "plain", variant=variant, with_tokenizer=False)
    assert len(on_ranks(2, lambda group: load(plain, group=group))) == 2


def test_a_norm_of_a_head_that_no_rank_has(tmp_path: Path) -> None:
    plain = tiny_checkpoint("stablelm", tmp_path / "plain", variant="parallel", with_tokenizer=False)
    name = "model.layers.0.self_attn.k_layernorm.norms.2.weight"
    folder = changed(plain, tmp_path / "m", lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(StartupError, match=f"^weight {name} is in the files"):
        on_ranks(2, lambda group: load(folder, group=group))


def warnings_of(folder: Path) -> tuple[str, ...]:
    return describe(examine(folder)).warnings


def test_a_head_of_its_own_is_kept_whatever_the_config_says(source: Path, tmp_path: Path) -> None:
    folder = changed(source, tmp_path / "m", lambda tensors: None, tie_word_embeddings=True)
    same_logits(folder, source)


def test_a_head_that_the_config_does_not_mean_is_warned_of(native: Path, tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    other = changed(native, tmp_path / "other", lambda tensors: None, tie_word_embeddings=True)
    copied = changed(native, tmp_path / "copied", copy, tie_word_embeddings=True)
    absent = changed(copied, tmp_path / "absent", lambda tensors: tensors.pop("lm_head.weight"))
    assert warnings_of(other) == (
        "config.json ties the head to the embedding, but the files hold another one: lm_head is used as it is stored",
    )
    assert warnings_of(copied) == warnings_of(absent) == warnings_of(native) == ()
    same_logits(copied, absent)


def test_a_head_that_is_missing(native: Path, tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    def prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"module.{name}"] = tensors.pop(name)

    said = changed(native, tmp_path / "said", remove, tie_word_embeddings=False)
    with pytest.raises(StartupError, match=r"`tie_word_embeddings` is false\), but the files hold no lm_head: set"):
        load(said)
    wrapped = changed(native, tmp_path / "wrapped", prefix, tie_word_embeddings=False)
    with pytest.raises(
        StartupError, match=r"neither model\.embed_tokens nor lm_head: .* such as module\.lm_head\.weight$"
    ):
        load(wrapped)
    silent = changed(native, tmp_path / "silent", remove, tie_word_embeddings=None)
    assert warnings_of(silent) == (
        "The files hold no lm_head: the embedding is the head, which config.json does not say",
    )


def test_an_embedding_that_is_missing(native: Path, tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors["model.embed_tokens.weight"]

    folder = changed(native, tmp_path / "m", remove)
    with pytest.raises(
        StartupError, match=r"^the files hold lm_head but no model\.embed_tokens, which config\.json does "
    ):
        load(folder)
    load(changed(native, tmp_path / "tied", remove, tie_word_embeddings=True))


def test_a_bias_of_one_layer_that_is_missing(tmp_path: Path) -> None:
    plain = tiny_checkpoint("gpt2", tmp_path / "plain", with_tokenizer=False)
    name = "transformer.h.2.attn.c_attn.bias"
    folder = changed(plain, tmp_path / "m", lambda tensors: tensors.pop(name))
    with pytest.raises(StartupError, match=f"^weight {name} does not exist, but "):
        load(folder)


def test_a_head_that_is_stored_quantized_is_no_copy(native: Path, tmp_path: Path) -> None:
    def quantize(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        embedding = tensors["model.embed_tokens.weight"]
        scale = embedding.abs().amax(1)
        tensors["lm_head.weight"] = (embedding / scale[:, None] * 127).round().to(torch.int8)
        tensors["lm_head.SCB"] = scale

    folder = changed(
        native, tmp_path / "m", quantize, tie_word_embeddings=True, quantization_config={"quant_method": "bitsandbytes"}
    )
    assert len(warnings_of(folder)) == 1
    load(folder)


@pytest.mark.parametrize("base", ["model.language_model.", "language_model.model."])
def test_the_text_model_of_a_vision_model_with_a_config_of_its_own(base: str, native: Path, tmp_path: Path) -> None:
    def move(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", base, 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.weight"] = torch.ones(3)

    same_logits(changed(native, tmp_path / "m", move), native)
