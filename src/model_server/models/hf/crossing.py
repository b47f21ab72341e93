"""Models whose cross attention reads images: what transformers' forward is given.

Image tokens stay; what the tower makes of images goes into the request's state, and masks say which token reads which.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from model_server.runner.runner import CrossStates

Arguments = dict[str, Any]
Pictures = Sequence[tuple[int, CrossStates]]
"""(place of an image token, its image), in order; none for text alone."""


class CrossAttention(Protocol):
    """The images of one kind of model."""

    def encode(self, features: dict[str, Tensor]) -> CrossStates:
        """One image."""

    def blank(self) -> CrossStates:
        """Return what the largest image gives, all 0."""

    def arguments(self, ids: Tensor, pictures: Pictures) -> tuple[Arguments, Arguments]:
        """Return arguments for a prompt `ids` [n], and for each later token."""


class MllamaImages:
    """Tokens read the last image before them; adjacent images are read together. Padding tiles are kept: tokens before
    the first image read all.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.model
        self._patches = int(self._model.vision_model.num_patches)  # of a tile
        self._most_tiles = int(model.config.vision_config.max_num_tiles)

    def encode(self, features: dict[str, Tensor]) -> CrossStates:
        states = self._model.vision_model(**features).last_hidden_state
        rows = self._model.multi_modal_projector(states).flatten(0, -2)
        return CrossStates(rows, num_tiles=int(features["aspect_ratio_mask"].sum()))

    def blank(self) -> CrossStates:
        weight = self._model.multi_modal_projector.weight
        return CrossStates(weight.new_zeros(self._most_tiles * self._patches, len(weight)), num_tiles=self._most_tiles)

    def arguments(self, ids: Tensor, pictures: Pictures) -> tuple[Arguments, Arguments]:
        if not pictures:
            return {}, {}
        states = torch.cat([encoded.rows for _, encoded in pictures])
        states = states.view(-1, self._patches, states.shape[1])
        mask = ids.new_zeros(1, len(ids), len(pictures), len(states) // len(pictures))
        stop, following = len(ids), len(ids)
        for number, (place, encoded) in reversed(list(enumerate(pictures))):
            stop = stop if following == place + 1 else following
            mask[0, place:stop, number, : encoded.num_tiles] = 1
            following = place
        now = {"cross_attention_states": states, "cross_attention_mask": mask}
        return now, {"cross_attention_mask": mask[:, -1:]}


class IdeficsImages:
    """Tokens read the last image before them within the same text."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model.model
        self._resamples = bool(config.use_resampler)
        ends = config.eos_token_id
        self._ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        vision = config.vision_config
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        count = config.perceiver_config.resampler_n_latents if self._resamples else 1 + (side // vision.patch_size) ** 2
        self._shape = (count, vision.embed_dim)
        # transformers before 5.24, which calls the cache otherwise, takes a request's images behind its dimension.
        self._flat = "cache" in inspect.signature(model.forward).parameters

    def encode(self, features: dict[str, Tensor]) -> CrossStates:
        states = self._model.vision_model(pixel_values=features["pixel_values"]).last_hidden_state
        return CrossStates((self._model.perceiver_resampler(states) if self._resamples else states)[0])

    def blank(self) -> CrossStates:
        return CrossStates(self._model.embed_tokens.weight.new_zeros(self._shape))

    def arguments(self, ids: Tensor, pictures: Pictures) -> tuple[Arguments, Arguments]:
        """Return arguments; text alone has an unread image of zeros."""
        mask = ids.new_zeros(1, len(ids), max(len(pictures), 1))
        places = [place for place, _ in pictures]
        ends = torch.isin(ids, ids.new_tensor(self._ends)).nonzero().flatten().tolist()
        for number, (place, stop) in enumerate(zip(places, [*places, len(ids)][1:], strict=True)):
            end = next((end + 1 for end in ends if place < end < stop), stop)
            mask[0, place:end, number] = 1
        states = torch.stack([encoded.rows for _, encoded in pictures] or [self.blank().rows])
        name = "perceiver_embeddings" if self._resamples else "image_encoder_embeddings"
        images = {name: states if self._flat else states.unsqueeze(0)}
        return images | {"image_attention_mask": mask}, images | {"image_attention_mask": mask[:, -1:]}


KINDS: dict[str, type[MllamaImages | IdeficsImages]] = {"idefics": IdeficsImages, "mllama": MllamaImages}


def cross_attention_of(model: Any) -> CrossAttention | None:
    """Return a model's cross attention, if known here."""
    kind = KINDS.get(model.config.model_type)
    return None if kind is None else kind(model)
