"""Heads that score texts, or guess masked tokens for sparse vectors; in float32, text by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.errors import StartupError
from model_server.layers.activation import activation
from model_server.models.config import ModelConfig
from model_server.models.model import Model
from model_server.pooling.modules import Stage, linear
from model_server.weights.reader import SafetensorsReader

# Hidden states of each text [tokens, hidden] -> scores [texts, labels] in float32.
ScoreHead = Callable[[Sequence[Tensor]], Tensor]
# Which of a text's tokens a head reads; late: all of them, and the mean of what it makes of each.
Reads = Literal["first", "last", "mean", "late"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A product and what follows it."""

    # Of the matrix; the first in the file counts.
    names: tuple[str, ...]
    activation: str | None = None
    # The name of a layer norm behind it.
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Layers, the last of which gives the scores."""

    reads: Reads
    layers: tuple[Layer, ...]


def _pooler(config: ModelConfig, act: str = "tanh") -> HeadSpec:
    prefixes = ("bert.", "nomic_bert.", "gte.", "new.", "deberta.", "")
    names = (*(f"{prefix}pooler.dense" for prefix in prefixes), "albert.pooler", "pooler")
    return HeadSpec("first", (Layer(names, act), Layer(("classifier",))))


def _dense(config: ModelConfig, act: str = "tanh") -> HeadSpec:
    return HeadSpec("first", (Layer(("classifier.dense",), act), Layer(("classifier.out_proj",))))


def _distilbert(config: ModelConfig) -> HeadSpec:
    return HeadSpec("first", (Layer(("pre_classifier",), "relu"), Layer(("classifier",))))


def _modernbert(config: ModelConfig) -> HeadSpec:
    reads: Reads = "mean" if config.text("classifier_pooling", "cls") == "mean" else "first"
    act = config.text("classifier_activation", "gelu")
    return HeadSpec(reads, (Layer(("head.dense",), act, "head.norm"), Layer(("classifier",))))


def _eurobert(config: ModelConfig) -> HeadSpec:
    kinds: dict[str, Reads] = {"bos": "first", "mean": "mean", "late": "late"}
    reads = kinds.get(config.text("classifier_pooling", "late"))
    if reads is None:
        raise StartupError(f"config.json: `classifier_pooling` {config.get('classifier_pooling')!r:.60} is not served")
    return HeadSpec(reads, (Layer(("dense",), "gelu"), Layer(("classifier",))))


def _score(config: ModelConfig) -> HeadSpec:
    """Describe a decoder's head, on the last token."""
    return HeadSpec("last", (Layer(("score",)),))


_HEADS: dict[str, Callable[[ModelConfig], HeadSpec]] = {
    "albert": _pooler,
    "bert": _pooler,
    "camembert": _dense,
    "deberta": lambda config: _pooler(config, config.text("pooler_hidden_act", "gelu")),
    "deberta-v2": lambda config: _pooler(config, config.text("pooler_hidden_act", "gelu")),
    "distilbert": _distilbert,
    "electra": lambda config: _dense(config, "gelu"),
    "eurobert": _eurobert,
    "gte": _pooler,
    "modernbert": _modernbert,
    "mpnet": _dense,
    "new": _pooler,
    "nomic_bert": _pooler,
    "roberta": _dense,
    "xlm-roberta": _dense,
}


def score_head(model: Model, device: torch.device, hidden_size: int) -> tuple[ScoreHead, int]:
    """Load a checkpoint's classifier, and count its scores."""
    config = model.config
    spec = _HEADS.get(config.model_type, _score)(config)
    with _reader(model, device) as reader:
        stages = [_stage(reader, layer, config) for layer in spec.layers]
        count = _matrix(reader, spec.layers[-1]).shape[0]

    def apply(rows: Tensor) -> Tensor:
        for stage in stages:
            rows = stage(rows)
        return rows

    def scores(texts: Sequence[Tensor]) -> Tensor:
        if spec.reads == "late":
            return torch.stack([apply(text.float()).mean(dim=0) for text in texts])
        return apply(torch.stack([_read(text, spec.reads) for text in texts]))

    return scores, count


def _read(text: Tensor, reads: Reads) -> Tensor:
    if reads == "mean":
        return text.float().mean(dim=0)
    return (text[0] if reads == "first" else text[-1]).float()


def answer_head(model: Model, device: torch.device, yes: int, no: int | None) -> ScoreHead:
    """Score by the logit of `yes` less that of `no`, behind the last token."""
    assert model.spec is not None
    names = model.spec.names
    with _reader(model, device, names.base) as reader:
        name = f"{names.head}.weight"
        if model.spec.tied_head or not reader.has(name):
            name = f"{names.embedding}.weight"
        rows = [reader.rows(name, [(token, token + 1)])[0] for token in (yes, no) if token is not None]
    weight = rows[0] if no is None else rows[0] - rows[1]

    def scores(texts: Sequence[Tensor]) -> Tensor:
        return torch.stack([(text[-1].float() * weight).sum() for text in texts]).unsqueeze(1)

    return scores


_MASKED: dict[str, tuple[Layer, tuple[str, ...], tuple[str, ...]]] = {
    # The transform; names of the matrix over the vocabulary; of its bias.
    "bert": (
        Layer(("cls.predictions.transform.dense",), "", "cls.predictions.transform.LayerNorm"),
        ("cls.predictions.decoder", "bert.embeddings.word_embeddings"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    "distilbert": (
        Layer(("vocab_transform",), "", "vocab_layer_norm"),
        ("vocab_projector", "distilbert.embeddings.word_embeddings"),
        ("vocab_projector.bias",),
    ),
    "roberta": (
        Layer(("lm_head.dense",), "gelu", "lm_head.layer_norm"),
        ("lm_head.decoder", "roberta.embeddings.word_embeddings"),
        ("lm_head.bias", "lm_head.decoder.bias"),
    ),
    "modernbert": (
        Layer(("head.dense",), "", "head.norm"),
        ("decoder", "model.embeddings.tok_embeddings"),
        ("decoder.bias",),
    ),
}
_MASKED["xlm-roberta"] = _MASKED["camembert"] = _MASKED["roberta"]


def masked_head(model: Model, device: torch.device) -> tuple[Stage, int]:
    """Load logits [n, vocab] of masked tokens, and the vocabulary's size."""
    found = _MASKED.get(model.config.model_type)
    if found is None:
        served = ", ".join(sorted(_MASKED))
        raise StartupError(f"sparse vectors are served for {served}, not for {model.config.model_type}")
    transform, matrices, biases = found
    if transform.activation == "":
        act = "hidden_activation" if model.config.model_type == "modernbert" else "hidden_act"
        act = "activation" if model.config.model_type == "distilbert" else act
        transform = Layer(transform.names, model.config.text(act, "gelu"), transform.norm)
    with _reader(model, device) as reader:
        first = _stage(reader, transform, model.config)
        weight = _matrix(reader, Layer(matrices))
        bias = next((_whole(reader, name) for name in biases if reader.has(name)), None)
    product = linear(weight, bias)
    return (lambda rows: product(first(rows))), weight.shape[0]


def _reader(model: Model, device: torch.device, base: str = "bert.") -> SafetensorsReader:
    return SafetensorsReader(model.checkpoint.headers, dtype=torch.float32, device=device, base_prefix=base)


def _stage(reader: SafetensorsReader, layer: Layer, config: ModelConfig) -> Stage:
    weight = _matrix(reader, layer)
    name = next(name for name in layer.names if reader.has(f"{name}.weight"))
    bias = _whole(reader, f"{name}.bias") if reader.has(f"{name}.bias") else None
    product = linear(weight, bias)
    norm = None if layer.norm is None else _norm(reader, layer.norm, weight.shape[0], config)
    function: Any = torch.tanh if layer.activation == "tanh" else None
    if layer.activation is not None and function is None:
        function = activation(layer.activation)

    def apply(rows: Tensor) -> Tensor:
        rows = product(rows.contiguous())
        rows = rows if function is None else function(rows)
        return rows if norm is None else norm(rows)

    return apply


def _norm(reader: SafetensorsReader, name: str, width: int, config: ModelConfig) -> Stage:
    weight = _whole(reader, f"{name}.weight")
    bias = _whole(reader, f"{name}.bias") if reader.has(f"{name}.bias") else None
    names = ("layer_norm_eps", "norm_eps")
    default = 1e-5 if config.model_type == "modernbert" else 1e-12
    eps = next((config.number(one, default) for one in names if config.get(one) is not None), default)
    return lambda rows: F.layer_norm(rows, (width,), weight, bias, eps)


def _matrix(reader: SafetensorsReader, layer: Layer) -> Tensor:
    name = next((name for name in layer.names if reader.has(f"{name}.weight")), None)
    if name is None:
        raise StartupError(f"weight {layer.names[0]}.weight does not exist: the model has no head for this task")
    return _whole(reader, f"{name}.weight")


def _whole(reader: SafetensorsReader, name: str) -> Tensor:
    return reader.rows(name, [(0, reader.shape(name)[0])])
