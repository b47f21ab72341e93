"""From a Spec and a checkpoint to a Decoder: names of tensors, and the rows and columns that this rank reads.

All sharding is here (model_server.md 4): layers only see matrices of their own size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.distributed import ProcessGroup
from model_server.errors import StartupError
from model_server.kv_cache import KvShape
from model_server.layers.activation import gated
from model_server.layers.embedding import Embedding, Head, vocab_range
from model_server.layers.linear import Linear, RowParallelLinear
from model_server.layers.norm import RmsNorm
from model_server.layers.rotary import Rotary, interleave_rows
from model_server.models.decoder import Attention, Block, Decoder, GatedMlp
from model_server.models.spec import Spec
from model_server.weights.reader import Range, WeightReader

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def build(
    spec: Spec,
    reader: WeightReader,
    *,
    device: torch.device,
    group: ProcessGroup,
    attention: AttentionBackend,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Read this rank's part of every tensor. `progress(done, total)` is called after each layer.

    Raises StartupError if the model cannot be divided among the ranks or a tensor is missing or of the wrong size.
    """
    return _Builder(spec, reader, device, group, attention).build(progress)


def head_ranges(spec: Spec, group: ProcessGroup) -> tuple[Range, Range]:
    """Query heads and KV heads [start, stop) of this rank.

    Fewer KV heads than ranks: each is kept by several ranks, rank r holding head r * num_kv_heads // size. TGI refuses
    all but one KV head there (model_server.md 4); its words are kept for what cannot be divided at all.
    """
    size, rank = group.size, group.rank
    for name, count in (("num_heads", spec.num_heads), ("num_key_value_heads", spec.num_kv_heads)):
        if count % size != 0 and (name == "num_heads" or size % count != 0):
            raise StartupError(
                f"`{name}` must be divisible by `num_shards` (got `{name}`: {count} and `num_shards`: {size}"
            )
    queries = spec.num_heads // size
    first = rank * spec.num_kv_heads // size
    return (rank * queries, (rank + 1) * queries), (first, first + max(spec.num_kv_heads // size, 1))


class _Builder:
    def __init__(
        self,
        spec: Spec,
        reader: WeightReader,
        device: torch.device,
        group: ProcessGroup,
        attention: AttentionBackend,
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._device = device
        self._group = group
        self._attention = attention
        self._query_heads, self._kv_heads = head_ranges(spec, group)
        self._intermediate = self._share(spec.intermediate_size)
        self._activation = gated(spec.activation)
        self._weight_bytes = 0

    def build(self, progress: Callable[[int, int], None] | None) -> Decoder:
        spec = self._spec
        embedding, head = self._vocabulary()
        norm = self._norm("model.norm.weight")
        blocks: list[Block] = []
        for index in range(spec.num_layers):
            blocks.append(self._block(index))
            if progress is not None:
                progress(index + 1, spec.num_layers)
        num_kv_heads = self._kv_heads[1] - self._kv_heads[0]
        return Decoder(
            embedding=embedding,
            blocks=blocks,
            norm=norm,
            head=head,
            rotary=Rotary(spec.rope, self._device),
            attention=self._attention,
            kv_shapes=(KvShape(num_kv_heads, spec.head_dim, spec.head_dim),) * spec.num_layers,
            vocab_size=spec.vocab_size,
            max_positions=spec.max_positions,
            weight_bytes=self._weight_bytes,
        )

    def _vocabulary(self) -> tuple[Embedding, Head]:
        """A tied head shares the embedding's memory where both hold the same rows."""
        spec, size = self._spec, self._group.size
        start, stop = vocab_range(spec.vocab_size, self._group)
        table = self._rows(EMBEDDING, [(start, stop)], spec.hidden_size)
        sharded = size > 1 and spec.vocab_size % size == 0
        rows = (start, stop) if sharded else (0, spec.vocab_size)
        if not spec.tied_head and self._reader.has(HEAD):
            matrix = self._rows(HEAD, [rows], spec.hidden_size)
        elif rows == (start, stop):
            matrix = table
        else:
            matrix = self._rows(EMBEDDING, [rows], spec.hidden_size)
        return Embedding(table, start, self._group), Head(Linear(matrix), self._group, sharded=sharded)

    def _block(self, index: int) -> Block:
        prefix = f"model.layers.{index}."
        return Block(
            attention_norm=self._norm(prefix + "input_layernorm.weight"),
            attention=self._attention_of(index, prefix + "self_attn."),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            mlp=self._mlp(prefix + "mlp."),
        )

    def _attention_of(self, index: int, prefix: str) -> Attention:
        spec = self._spec
        dim = spec.head_dim
        queries, keys = ((a * dim, b * dim) for a, b in (self._query_heads, self._kv_heads))
        parts = [(prefix + "q_proj", queries, True), (prefix + "k_proj", keys, True), (prefix + "v_proj", keys, False)]
        layer = AttentionLayer(
            index=index,
            num_heads=self._query_heads[1] - self._query_heads[0],
            num_kv_heads=self._kv_heads[1] - self._kv_heads[0],
            head_dim=dim,
            scale=spec.scale,
            window=spec.windows[index],
        )
        return Attention(
            qkv=self._column_linear(parts, spec.hidden_size),
            output=self._row_linear(prefix + "o_proj", queries, spec.hidden_size),
            qk_norm=self._qk_norm(prefix, layer),
            layer=layer,
        )

    def _qk_norm(self, prefix: str, layer: AttentionLayer) -> RmsNorm | None:
        """One norm for query and key heads together: the weight of each is repeated for its heads."""
        if not self._reader.has(prefix + "q_norm.weight"):
            return None
        weights = [
            interleave_rows(self._rows(f"{prefix}{name}_norm.weight", [(0, layer.head_dim)]), layer.head_dim)
            for name in ("q", "k")
        ]
        heads = [
            weight.expand(count, -1)
            for weight, count in zip(weights, (layer.num_heads, layer.num_kv_heads), strict=True)
        ]
        return RmsNorm(torch.cat(heads), self._spec.norm_eps)

    def _mlp(self, prefix: str) -> GatedMlp:
        parts = [(prefix + name, self._intermediate, False) for name in ("gate_proj", "up_proj")]
        return GatedMlp(
            gate_up=self._column_linear(parts, self._spec.hidden_size),
            activation=self._activation,
            down=self._row_linear(prefix + "down_proj", self._intermediate, self._spec.hidden_size),
        )

    def _column_linear(self, parts: list[tuple[str, Range, bool]], num_columns: int) -> Linear:
        """Several layers of the same input as one matrix: of each (prefix, rows, rotary) those rows, in order."""
        weights, biases = [], []
        for prefix, rows, rotary in parts:
            weight = self._rows(prefix + ".weight", [rows], num_columns)
            bias = self._rows(prefix + ".bias", [rows]) if self._reader.has(prefix + ".bias") else None
            if rotary:
                weight = interleave_rows(weight, self._spec.head_dim)
                bias = None if bias is None else interleave_rows(bias, self._spec.head_dim)
            weights.append(weight)
            biases.append(bias)
        present = [b for b in biases if b is not None]
        if present and len(present) < len(biases):
            raise StartupError(f"weight {parts[0][0]}.bias and its neighbours must all exist or none")
        return Linear(torch.cat(weights), torch.cat(present) if present else None)

    def _row_linear(self, prefix: str, columns: Range, num_rows: int) -> RowParallelLinear:
        name = prefix + ".weight"
        self._expect(name, 0, num_rows)
        weight = self._count(self._reader.columns(name, *columns))
        # Summed over the ranks, a bias must be added once.
        with_bias = self._group.rank == 0 and self._reader.has(prefix + ".bias")
        bias = self._rows(prefix + ".bias", [(0, num_rows)]) if with_bias else None
        return RowParallelLinear(Linear(weight, bias), self._group)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._rows(name, [(0, self._spec.hidden_size)]), self._spec.norm_eps)

    def _rows(self, name: str, ranges: list[Range], num_columns: int | None = None) -> Tensor:
        if num_columns is not None:
            self._expect(name, 1, num_columns)
        return self._count(self._reader.rows(name, ranges))

    def _expect(self, name: str, dimension: int, size: int) -> None:
        shape = self._reader.shape(name)
        if len(shape) != 2 or shape[dimension] != size:
            raise StartupError(
                f"weight {name} has shape {list(shape)}; the config asks for {size} at dimension {dimension}"
            )

    def _count(self, tensor: Tensor) -> Tensor:
        self._weight_bytes += tensor.nbytes
        return tensor

    def _share(self, size: int) -> Range:
        """This rank's part of a dimension that must divide evenly."""
        count = self._group.size
        if size % count != 0:
            # TGI's words, spelling included.
            raise StartupError(f"The choosen size {size} is not compatible with sharding on {count} shards")
        share = size // count
        return self._group.rank * share, (self._group.rank + 1) * share
