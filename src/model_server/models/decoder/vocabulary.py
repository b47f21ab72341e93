"""From token ids to first hidden states, and from last ones to logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.errors import StartupError
from model_server.layers.embedding import Embedding, Head, InputEmbedding, vocab_range
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.onednn import OneDnnLinear
from model_server.layers.linear.packed import PackedLinear
from model_server.layers.norm import AddNorm
from model_server.models.decoder.blocks import residual_norm
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.spec import Spec
from model_server.quantization.forms import Form, Plain
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.products import HeadTable, Product, Table
from model_server.weights.reader import Range


@dataclass(frozen=True, slots=True)
class Output:
    """From the last residual stream to logits."""

    norm: AddNorm | None
    projection: Linear | None
    head: Head | None

    def before_head(self, hidden: Tensor, added: Tensor | None) -> Tensor:
        """Return what the head reads, [n, embedding size]."""
        _, hidden = residual_norm(self.norm, hidden, added)
        return hidden if self.projection is None else self.projection(hidden)


def load_vocabulary(
    loader: Loader, spec: Spec, *, has_input: bool, has_output: bool
) -> tuple[InputEmbedding | None, Output | None]:
    """Load this rank's embedding and output; a tied head shares memory if the rows agree."""
    group, names = loader.tensor_group, spec.names
    own, shared = (0, spec.vocab_size), vocab_range(spec.vocab_size, group)
    sharded = group.size > 1 and spec.vocab_size % group.size == 0
    head_rows = shared if sharded else own
    embedding = names.embedding
    if spec.tied_head and not loader.holds(embedding) and loader.holds(names.head):
        embedding = names.head  # of two names for one tensor some checkpoints kept the other
    table = _matrix(loader, spec, embedding, shared) if has_input else None
    start = None if table is None else _input(loader, spec, table, embedding)
    if not has_output:
        return start, None
    if not spec.has_head:
        return start, Output(_last_norm(loader, spec), None, None)
    stored = embedding
    if not spec.tied_head and loader.holds(names.head):
        stored = names.head
        form = _matrix(loader, spec, names.head, head_rows)
    elif table is not None and head_rows == shared:
        form = table
    else:
        form = _matrix(loader, spec, embedding, head_rows)
    return start, _output(loader, spec, form, head_rows, stored, sharded=sharded, is_shared=form is table)


def head_over(loader: Loader, name: str, vocab_size: int, width: int) -> Head:
    """Load a head `name` [vocab_size, width], divided as in `load_vocabulary`."""
    group = loader.tensor_group
    sharded = group.size > 1 and vocab_size % group.size == 0
    rows = vocab_range(vocab_size, group) if sharded else (0, vocab_size)
    linear = loader.column_linear([Part(name, (rows,), vocab_size)], width, as_stored=True)
    return Head(linear, group, sharded=sharded)


def _matrix(loader: Loader, spec: Spec, name: str, rows: Range) -> Form:
    return loader.matrix(_slice(spec, name, rows), as_stored=True)


def _slice(spec: Spec, name: str, rows: Range) -> MatrixSlice:
    width = _embedding_width(spec)
    return MatrixSlice(parts=(Part(name, (rows,), spec.vocab_size),), columns=(0, width), num_columns=width)


def _table(loader: Loader, spec: Spec, module: str, stored: str, form: Form) -> Table:
    """Describe a matrix stored as `stored`."""

    def rows(wanted: Range) -> Tensor:
        return loader.read_again(_slice(spec, stored, wanted), loader.reader.dtype, as_stored=True)

    return Table(module=module, size=spec.vocab_size, rows=rows, is_quantized=not isinstance(form, Plain))


def _embedding_width(spec: Spec) -> int:
    return spec.hidden_size if spec.embedding_size is None else spec.embedding_size


def _input(loader: Loader, spec: Spec, rows: Form, stored: str) -> InputEmbedding:
    names = spec.names
    start, _ = vocab_range(spec.vocab_size, loader.tensor_group)
    embedding = Embedding(rows.dequantize(loader.reader.dtype), start, loader.tensor_group)
    projection = multiplier = None
    table = None
    if names.positions is not None:
        table = loader.whole(names.positions + ".weight")
        if spec.max_positions is not None and len(table) != spec.max_positions + spec.position_offset:
            raise StartupError(
                f"weight {names.positions}.weight has {len(table)} rows; the config asks for "
                f"{spec.max_positions + spec.position_offset}"
            )
    types = None if names.token_types is None else loader.whole(names.token_types + ".weight")
    if names.embedding_projection is not None and loader.holds(names.embedding_projection):
        part = Part(names.embedding_projection, ((0, spec.hidden_size),), spec.hidden_size)
        projection = loader.column_linear([part], _embedding_width(spec), as_stored=True)
    if spec.embedding_multiplier != 1.0:
        # It has the weights' dtype, as transformers multiplies: in bfloat16 Gemma's root of the width is a rounded one.
        multiplier = torch.tensor(spec.embedding_multiplier, dtype=embedding.dtype, device=loader.device)
    return InputEmbedding(
        loader.changes.embedding(embedding, _table(loader, spec, names.embedding, stored, rows)),
        multiplier=multiplier,
        projection=projection,
        position_table=table,
        position_offset=spec.position_offset,
        type_table=types,
        norm=None if names.embedding_norm is None else loader.norm(names.embedding_norm, spec.hidden_size),
    )


def _last_norm(loader: Loader, spec: Spec) -> AddNorm | None:
    if spec.names.norm is None:
        return None
    return loader.stream_norm(spec.names.norm, spec.hidden_size, is_wide=spec.wide_stream, is_last=True)


def _head_bias(loader: Loader, spec: Spec, rows: Range) -> Tensor | None:
    """Read the head's bias. Raises StartupError for one that the family does not have: its own code would ignore it."""
    name = spec.names.head + ".bias"
    if not loader.has(name):
        return None
    bias = loader.vector(name, [rows], spec.vocab_size)
    if spec.head_bias:
        return bias
    if bool(bias.any()):
        raise StartupError(
            f"weight {name} is in the files, but the head of this model has no bias by config.json: give the files "
            "that belong to this config.json, or remove from them what is not the model's"
        )
    return None


def _output(
    loader: Loader, spec: Spec, form: Form, rows: Range, stored: str, *, sharded: bool, is_shared: bool
) -> Output:
    names, projection = spec.names, None
    if spec.normalized_head:
        form = Plain(F.normalize(form.dequantize(loader.reader.dtype)))
    bias = _head_bias(loader, spec, rows)
    norm = _last_norm(loader, spec)
    if names.output_projection is not None and loader.holds(names.output_projection):
        part = Part(names.output_projection, ((0, _embedding_width(spec)),), _embedding_width(spec))
        projection = loader.column_linear([part], spec.hidden_size, as_stored=True)
    table = None
    if not spec.normalized_head:
        tied_to = names.embedding if spec.tied_head or stored != names.head else None
        table = HeadTable(table=_table(loader, spec, names.head, stored, form), rows=rows, bias=bias, tied_to=tied_to)
    product = Product(
        parts=(Part(names.head, (rows,), spec.vocab_size),),
        columns=None,
        weight=lambda: loader.read_again(_slice(spec, stored, rows), torch.float32, as_stored=True),
        bias=bias,
    )
    plain = loader.linears.make(form, bias)
    if is_shared and isinstance(plain, PackedLinear | OneDnnLinear):  # a copy beside the embedding's rows
        loader.weight_bytes += form.nbytes
    head = Head(
        loader.changes.linear(plain, product, table),
        loader.tensor_group,
        sharded=sharded,
        gathers_rounded=loader.device.type == "cuda",
        multiplier=spec.logits_multiplier,
        softcap=spec.logits_softcap,
        plain=plain,
    )
    return Output(norm, projection, head)
