"""MLP speculators: a hidden state that takes up a token for each place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.features.drafts.drafters.drafts import forced_or
from model_server.layers.embedding import Embedding, Head, vocab_range
from model_server.layers.linear.linear import Linear
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.vocabulary import head_over
from model_server.weights.matrix import Part

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SpeculatorShape:
    """What the config says."""

    # Places that it was made for, which weigh states and tokens.
    number: int
    inner: int
    hidden_size: int
    vocab_size: int
    # Places share matrices.
    tied: bool
    # The first state is normalized.
    scales_input: bool


@dataclass(frozen=True, slots=True)
class Place:
    """The matrices of one place; norm: weight and bias [inner]."""

    embedding: Embedding
    projection: Linear
    norm: tuple[Tensor, Tensor]
    head: Head


class MlpSpeculator:
    def __init__(self, places: list[Place], shape: SpeculatorShape) -> None:
        self._places = places
        self._last_id = shape.vocab_size - 1  # the model may have more ids, which no text has
        self._scales_input = shape.scales_input
        self._state_weight = 0.5 ** (0.5 / shape.number)
        self._token_weight = math.sqrt((1 - self._state_weight**2) * (shape.inner / 2))

    def guess(self, hidden: Tensor, newest: Tensor, forced: Tensor | None, most: int) -> Tensor:
        state = _normalized(hidden) / math.sqrt(2) if self._scales_input else hidden
        token = newest.clamp(max=self._last_id)
        found: list[Tensor] = []
        for number, place in enumerate(self._places[:most]):
            state = torch.add(
                place.projection(state) * self._state_weight, place.embedding(token), alpha=self._token_weight
            )
            weight, bias = place.norm
            state = F.gelu(_normalized(state) * weight + bias)
            token = forced_or(place.head.likeliest(state), forced, number).clamp(max=self._last_id)
            found.append(token)
        return torch.stack(found, dim=1)


def load_mlp_speculator(loader: Loader, number: int, shape: SpeculatorShape) -> MlpSpeculator:
    """For the first `number` places. Raises StartupError."""
    places: list[Place] = []
    for place in range(number):
        shared = places[-1] if shape.tied and places else None
        # The first projection is from the width of the model, and shared by none.
        own = min(place, 1) if shape.tied else place
        columns = shape.hidden_size if place == 0 else shape.inner
        projection = (
            places[-1].projection
            if shape.tied and place > 1
            else loader.column_linear(
                [Part(f"speculator.proj.{own}", ((0, shape.inner),), shape.inner)], columns, as_stored=True
            )
        )
        if shared is not None:
            places.append(Place(shared.embedding, projection, shared.norm, shared.head))
            continue
        start, stop = vocab_range(shape.vocab_size, loader.tensor_group)
        table = loader.rows(f"speculator.emb.{place}.weight", [(start, stop)], shape.inner)
        norm = (
            loader.rows(f"speculator.ln.{place}.weight", [(0, shape.inner)]),
            loader.rows(f"speculator.ln.{place}.bias", [(0, shape.inner)]),
        )
        head = head_over(loader, f"speculator.head.{place}", shape.vocab_size, shape.inner)
        places.append(Place(Embedding(table, start, loader.tensor_group), projection, norm, head))
    return MlpSpeculator(places, shape)


def _normalized(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)
