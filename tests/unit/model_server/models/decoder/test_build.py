"""Building a decoder from named tensors: what is read, by which rank, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loading import child_environment, load
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.reference import ReferenceBackend
from model_server.cpp import library as cpp
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.multi_head import head_ranges
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of
from model_server.weights.reader import Range

CPU = torch.device("cpu")
# Bytes that a tied head takes beside the embedding.
PACKED_HEAD = 100 * 64 * 4 if cpp.usable(CPU, torch.float32) else 0


class Rank(ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class RandomReader:
    """Any tensor of the expected llama shapes; keeps what was asked for."""

    dtype = torch.float32
    device = CPU

    def __init__(self, spec: Spec, without: Sequence[str] = ("lm_head", "bias", "_norm.")) -> None:
        widths = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        self._rows = {f"{n}_proj": h * spec.head_dim for n, h in widths.items()} | {
            "o_proj": spec.hidden_size, "gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size,
            "down_proj": spec.hidden_size, "embed_tokens": spec.vocab_size, "lm_head": spec.vocab_size,
        }  # fmt: skip
        columns = {"o_proj": spec.num_heads * spec.head_dim, "down_proj": spec.intermediate_size}
        self._spec, self._columns, self._without = spec, columns, without
        self.asked: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        return name.endswith((".weight", ".bias")) and not any(word in name for word in self._without)

    def shape(self, name: str) -> tuple[int, ...]:
        part = name.split(".")[-2]
        if part not in self._rows:
            return (self._spec.hidden_size,)
        rows = self._rows[part]
        return (rows,) if name.endswith("bias") else (rows, self._columns.get(part, self._spec.hidden_size))

    def stored(self, name: str) -> str:
        return "F32"

    def skip(self, *names: str) -> None:
        pass

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        self.asked[name] = list(ranges)
        return torch.randn(sum(b - a for a, b in ranges), *self.shape(name)[1:])

    def fill(
        self, out: Tensor, name: str, rows: Sequence[Range], columns: Range | None = None, *,
        index: int | None = None, place: Any = Tensor.copy_, unit: int = 1,
    ) -> None:  # fmt: skip
        rows = list(rows)
        whole = columns is None or columns == (0, self.shape(name)[1])
        self.asked[name] = rows if whole else columns
        place(out, torch.randn(sum(b - a for a, b in rows), out.shape[1]))


def spec(**fields: Any) -> Spec:
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    return spec_of(ModelConfig({"model_type": "llama", **sizes, **fields}))


def assemble(reader: RandomReader, group: ProcessGroup, model: Spec | None = None, **options: Any) -> Decoder:
    return build(
        model or reader._spec, reader, Placement(CPU, torch.float32, Ranks.of(group)), ReferenceBackend(), **options
    )


@pytest.mark.parametrize(
    ("kv_heads", "size", "wanted"),
    [
        (4, 1, [((0, 8), (0, 4))]),
        (4, 2, [((0, 4), (0, 2)), ((4, 8), (2, 4))]),
        (2, 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
        (1, 2, [((0, 4), (0, 1)), ((4, 8), (0, 1))]),
    ],
)
def test_head_ranges(kv_heads: int, size: int, wanted: list[tuple[Range, Range]]) -> None:
    model = spec(num_attention_heads=8, num_key_value_heads=kv_heads)
    assert [head_ranges(model, Rank(r, size)) for r in range(size)] == wanted


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (4, 2, 3, "`num_heads` must be divisible by `num_shards` (got `num_heads`: 4 and `num_shards`: 3"),
        (
            12, 3, 2,
            "`num_key_value_heads` must be divisible by `num_shards` (got `num_key_value_heads`: 3 and `num_shards`: 2",
        ),
    ],
)  # fmt: skip
def test_indivisible_heads_in_tgis_words(heads: int, kv_heads: int, size: int, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        head_ranges(spec(hidden_size=96, num_attention_heads=heads, num_key_value_heads=kv_heads), Rank(0, size))
    assert str(caught.value) == message


def test_indivisible_mlp_in_tgis_words() -> None:
    model = spec(intermediate_size=97)
    with pytest.raises(StartupError) as caught:
        assemble(RandomReader(model), Rank(1, 2))
    assert str(caught.value) == "The choosen size 97 is not compatible with sharding on 2 shards"


def test_each_rank_reads_its_part() -> None:
    reader = RandomReader(spec(), without=("lm_head", "_norm."))
    runner = assemble(reader, Rank(1, 2))
    prefix = "model.layers.0."
    assert reader.asked[prefix + "self_attn.q_proj.weight"] == [(32, 64)]
    assert reader.asked[prefix + "self_attn.k_proj.weight"] == [(16, 32)]
    assert reader.asked[prefix + "self_attn.v_proj.bias"] == [(16, 32)]
    assert reader.asked[prefix + "self_attn.o_proj.weight"] == (32, 64)
    assert reader.asked[prefix + "mlp.up_proj.weight"] == [(48, 96)]
    assert reader.asked[prefix + "mlp.down_proj.weight"] == (48, 96)
    assert reader.asked["model.embed_tokens.weight"] == [(50, 100)]
    # A row-parallel bias is added once, by rank 0.
    assert prefix + "self_attn.o_proj.bias" not in reader.asked
    assert [s.num_kv_heads for s in runner.kv_shapes] == [1, 1]


def test_rank_0_takes_the_row_bias() -> None:
    reader = RandomReader(spec(), without=("lm_head", "_norm."))
    assemble(reader, Rank(0, 2))
    assert reader.asked["model.layers.1.mlp.down_proj.bias"] == [(0, 64)]


def test_odd_vocabulary_keeps_the_whole_head_on_every_rank() -> None:
    reader = RandomReader(spec(vocab_size=101), without=("bias", "_norm."))
    assemble(reader, Rank(1, 2))
    assert reader.asked["model.embed_tokens.weight"] == [(51, 101)]
    assert reader.asked["lm_head.weight"] == [(0, 101)]


def test_a_tied_head_costs_no_more_than_its_packed_copy() -> None:
    own, tied, absent = (
        assemble(reader, ProcessGroup()).traits.weight_bytes
        for reader in (
            RandomReader(spec(), without=("bias", "_norm.")),
            RandomReader(spec(tie_word_embeddings=True), without=("bias", "_norm.")),
            RandomReader(spec()),
        )
    )
    assert tied == absent == own - 100 * 64 * 4 + PACKED_HEAD


def test_a_tied_embedding_may_go_by_the_head_s_name() -> None:
    reader = RandomReader(spec(tie_word_embeddings=True), without=("embed_tokens", "bias", "_norm."))
    assemble(reader, Rank(1, 2))
    assert reader.asked["lm_head.weight"] == [(50, 100)] and "model.embed_tokens.weight" not in reader.asked


def test_progress_counts_layers() -> None:
    seen: list[tuple[int, int]] = []
    assemble(RandomReader(spec()), ProcessGroup(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_facts_of_the_runner() -> None:
    runner = assemble(RandomReader(spec(max_position_embeddings=77)), ProcessGroup())
    assert (runner.vocab_size, runner.max_positions) == (100, 77)
    numbers = 100 * 64 + 64 + 2 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 128)
    assert runner.traits.weight_bytes == 4 * numbers + PACKED_HEAD


def test_config_and_file_must_agree() -> None:
    reader = RandomReader(spec())
    with pytest.raises(
        StartupError, match=r"embed_tokens.weight has shape \[100, 64\]; the config asks for 32 at dimension 1"
    ):
        assemble(reader, ProcessGroup(), spec(hidden_size=32, head_dim=16, vocab_size=100, tie_word_embeddings=True))


@pytest.mark.parametrize("name", ["project_in", "project_out"])
def test_projections_of_the_embedding_have_the_sizes_of_the_config(tmp_path: Path, name: str) -> None:
    """OPT's. What is multiplied natively is not looked at again."""
    path = tiny_checkpoint("opt", tmp_path, with_tokenizer=False, word_embed_proj_dim=32, do_layer_norm_before=False)
    weights = load_file(path / "model.safetensors")
    key = f"model.decoder.{name}.weight"
    weights[key] = torch.zeros(weights[key].shape[0], weights[key].shape[1] + 8)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=rf"{name}\.weight has shape .*; the config asks for .* at dimension 1"):
        load(path)


def test_biases_all_or_none() -> None:
    reader = RandomReader(spec(), without=("lm_head", "_norm.", "k_proj.bias"))
    with pytest.raises(
        StartupError, match=r"self_attn\.q_proj\.bias: either all biases of this layer must exist or none"
    ):
        assemble(reader, ProcessGroup())


def test_missing_tensor_and_unknown_type(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "m", with_tokenizer=False, num_hidden_layers=1)
    config = path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(StartupError, match=r"^weight model\.layers\.1\.input_layernorm\.weight does not exist$"):
        load(path)
    config.write_text(text.replace('"model_type": "llama"', '"model_type": "lama"'))
    with pytest.raises(StartupError, match=r"^Unsupported model type lama: neither Tercet nor transformers knows it$"):
        load(path)
    (path / "model.safetensors").unlink()
    config.write_text(text)
    with pytest.raises(StartupError, match=r"has no \*\.safetensors"):
        load(path)


def test_loading_imports_no_transformers() -> None:
    """It would cost seconds of start-up."""
    program = (
        "import sys\n"
        "from model_server.weights.locate import resolve\n"
        "from support.loading import load\n"
        "load(resolve('demo', None))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=child_environment())
