"""Images of prompts, a `batch.feature.ModelFeature`: encoded before a forward, then laid over their tokens.

A bad one fails its request alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.batch.feature import Admission, ModelFeature
from model_server.batch.growth import Failure
from model_server.batch.sequence import NewRequest, Sequence
from model_server.errors import RequestError, StartupError
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.image import AskedImages, ImagePlace
from model_server.features.images.placed import PlacedImage, PromptImages, check_places
from model_server.memory.budget import is_out_of_memory
from model_server.memory.transfer import Staging
from model_server.runner.runner import CrossStates, ModelInputs
from wire.images.borders import chunk_end

logger = logging.getLogger(__name__)

CANNOT_READ = "the model's vision tower cannot read the image"
# Of a sequence in a step: its images, its first token, and the one behind its last.
Span = tuple[PromptImages | None, int, int]
# (first row of the step, what is there instead or added)
Embeddings = tuple[tuple[int, Tensor], ...]


class Images(ModelFeature):
    """What reads the images of one model."""

    name = "images"

    def __init__(self, encoder: ImageEncoder, vocab_size: int, *, reserve: int = 0) -> None:
        self.encoder = encoder
        # Tokens whose state is as large as an image's part of it.
        self.reserve = reserve
        # Of the logits, which may lack the image token.
        self._vocab_size = vocab_size

    @property
    def reads_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt see each other, so that none is cut or shared."""
        return self.encoder.tower.family.sight == "prompt"

    def start(self, longest: int) -> int:
        self.encoder.start(longest)
        return self.encoder.capacity * self.encoder.tower.row_bytes

    def try_out(self, *, largest: bool) -> object:
        """Encode an image as the router prepares it."""
        try:
            return self.encoder.try_out(largest=largest)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if not isinstance(error, RequestError):
                logger.exception("The vision tower cannot read an image of the warm-up")
            raise StartupError(f"image processor and vision tower of the model do not fit: {error!s:.200}") from error

    def admit(self, admission: Admission) -> None:
        asked = admission.read(AskedImages)
        places = () if asked is None else asked.places
        if not places and not self.reads_whole_prompts:
            return
        images = self._placed(admission.request, places, admission.prompt)
        admission.attachments.append(images)
        if self.encoder.tower.image_token < self._vocab_size:
            return
        # There are no logits for image tokens. Of a prompt without another token something must be left.
        admission.known = np.delete(admission.known, images.all_tokens).tolist() or [0]
        if not images.crosses:  # embeddings are laid over them, and the text model may have none for them
            for place in images.all_tokens.tolist():
                admission.prompt[place] = 0

    def prepare(self, sequences: Rows[Sequence]) -> tuple[list[Failure], object]:
        """Encode what the next forward reads.

        A lack of memory ends the step if this rank is alone: other ranks would wait.
        """
        failures = []
        for sequence in sequences:
            images = _images_of(sequence)
            if images is None or sequence.finished:
                continue
            wanted = images.wanted(sequence.cache_length, sequence.cache_length + sequence.input_length)
            if not wanted:
                continue
            reason = self._encode(sequence.id, wanted)
            if not self.encoder.all_succeeded(reason is None):
                failures.append((sequence, f"request {sequence.id}: {reason or CANNOT_READ}"))
        return failures, self.encoder.take_counts()

    def extend(
        self, inputs: ModelInputs, sequences: Rows[Sequence], counts: Rows[int], staging: Staging
    ) -> ModelInputs:
        """Add positions, embeddings, what cross attention reads, and which keys are seen, to a step with prompts."""
        spans = [(_images_of(s), s.cache_length, s.cache_length + s.input_length) for s in sequences]
        if inputs.logit_rows is None or all(images is None for images, _, _ in spans):
            return inputs
        attention = inputs.attention
        positions, *reach = staging.upload(_positions(spans), *(_reach(spans) or ()))
        if reach:
            in_windows = self.encoder.tower.family.sight_in_windows
            attention = dataclasses.replace(
                attention, last_keys=reach[0], first_keys=reach[1], ahead_in_windows=in_windows
            )
        embeddings, deep, crossing = _states(spans)
        return dataclasses.replace(
            inputs, attention=attention, positions=positions, embeddings=embeddings, deep_embeddings=deep,
            cross_states=crossing,
        )  # fmt: skip

    def _placed(self, request: NewRequest, places: Rows[ImagePlace], prompt: list[int]) -> PromptImages:
        check_places(request.id, places, len(prompt), request.cache_len)
        try:
            images = PromptImages(self.encoder.tower.family, places, prompt, self.encoder.tower.image_token)
        except RequestError as error:
            raise RequestError(f"request {request.id}: {error}") from None
        if request.chunk_len is not None:
            end = request.cache_len + request.chunk_len
            if chunk_end(request.cache_len, end, images.whole) != end:
                raise RequestError(
                    f"request {request.id}: its first chunk ends within an image that is read as a whole"
                )
        images.pass_by(request.cache_len)
        return images

    def _encode(self, request_id: int, wanted: Iterable[PlacedImage]) -> str | None:
        """Encode one request's images; say why one cannot be."""
        try:
            for one in wanted:
                one.encode(self.encoder.find)
        except (torch.OutOfMemoryError, MemoryError):
            if self.encoder.is_alone:
                raise
            logger.exception("no memory for an image of request %d", request_id)
            return CANNOT_READ
        except RequestError as error:
            return str(error)
        except Exception:
            logger.exception("an image of request %d cannot be encoded", request_id)
            return CANNOT_READ
        return None


def _images_of(sequence: Sequence) -> PromptImages | None:
    return next((one for one in sequence.attachments if isinstance(one, PromptImages)), None)


def _positions(spans: Rows[Span]) -> npt.NDArray[np.int64]:
    """Return [num_tokens] int64, or [3, num_tokens] if some differ."""
    if any(images is not None and images.has_sections(a, b) for images, a, b in spans):
        parts = [
            np.tile(np.arange(a, b, dtype=np.int64), (3, 1)) if images is None else images.positions(a, b)
            for images, a, b in spans
        ]
        return np.concatenate(parts, axis=1)
    starts = [(a, b, 0 if images is None else images.offset_at(a)) for images, a, b in spans]
    return np.concatenate([np.arange(a + offset, b + offset, dtype=np.int64) for a, b, offset in starts])


def _reach(spans: Rows[Span]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Return the step's `last_keys` and `first_keys`; None if all is causal."""
    found = [None if images is None else images.reach(a, b) for images, a, b in spans]
    if not any(found):
        return None
    parts = [
        (np.arange(a, b, dtype=np.int64), np.full(b - a, -1, np.int64)) if one is None else one
        for one, (_, a, b) in zip(found, spans, strict=True)
    ]
    return np.concatenate([last for last, _ in parts]), np.concatenate([first for _, first in parts])


def _states(spans: Rows[Span]) -> tuple[Embeddings, Embeddings, tuple[tuple[int, CrossStates], ...]]:
    """Return, by row of the step, what replaces image tokens, what is added, and what cross attention reads."""
    embeddings: list[tuple[int, Tensor]] = []
    deep: list[tuple[int, Tensor]] = []
    crossing: list[tuple[int, CrossStates]] = []
    start = 0
    for images, first, stop in spans:
        if images is not None and images.crosses:
            found = images.pictures(first, stop)
            crossing += [(start + row, CrossStates(one.rows, one.num_tiles)) for row, one in found]
        elif images is not None:
            for row, rows, layers in images.spans(first, stop):
                embeddings.append((start + row, rows))
                deep += [] if layers is None else [(start + row, layers)]
        start += stop - first
    return tuple(embeddings), tuple(deep), tuple(crossing)
