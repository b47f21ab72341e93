"""One request's images, an `Attachment` of its sequence: their tokens, encodings, positions."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_server.batch.sequence import Attachment
from model_server.errors import RequestError
from model_server.features.images.families import VisionFamily
from model_server.features.images.image import KEY_BYTES, Encoded, Image, ImagePlace
from wire.images.borders import chunk_end, encoder_end

Indices = npt.NDArray[np.int64]


class PlacedImage:
    """An image at its tokens."""

    __slots__ = ("encoded", "image", "runs", "start", "stop", "tokens")

    def __init__(self, place: ImagePlace, tokens: Indices) -> None:
        assert place.image is not None
        # None once encoded: it takes no memory or files.
        self.image: Image | None = place.image
        self.start = place.start
        self.stop = place.stop
        # Places of image tokens, one per row.
        self.tokens = tokens
        # None: not yet, or not needed.
        self.encoded: Encoded | None = None
        firsts = np.flatnonzero(np.diff(tokens, prepend=-2) != 1)
        counts = np.diff(np.append(firsts, len(tokens)))
        # (first token, first row, count) of consecutive ones.
        self.runs = list(zip(tokens[firsts].tolist(), firsts.tolist(), counts.tolist(), strict=True))

    def encode(self, encode: Callable[[Image], Encoded]) -> None:
        """Once. Raises what `encode` raises."""
        assert self.image is not None
        self.encoded = encode(self.image)
        self.image = None


class PromptImages(Attachment):
    """A sequence's images; `offset` from a token's place in the cache to its position."""

    def __init__(self, family: VisionFamily, places: Rows[ImagePlace], ids: Rows[int], image_token: int) -> None:
        """Check and place them in the prompt's ids."""
        tokens = np.flatnonzero(np.asarray(ids, np.int64) == image_token)
        of_place = [tokens[(tokens >= p.start) & (tokens < p.stop)] for p in places]
        for place, found in zip(places, of_place, strict=True):
            _check(family, place, len(found))
        self._positions: Indices | None = None
        self._images = [PlacedImage(p, t) for p, t in zip(places, of_place, strict=True) if p.image is not None]
        self._left = list(self._images)  # whose last tokens are not yet in the cache
        self.all_tokens: Indices = np.concatenate([np.zeros(0, np.int64), *of_place])
        self.offset = family.first_position
        self.length = len(ids)
        self.sight = family.sight
        self.sight_past_windows = family.sight_past_windows
        self.crosses = family.crosses
        if family.positions == "sections":
            self._positions, self.offset = _sections(places, of_place, len(ids))

    def wanted(self, start: int, stop: int) -> list[PlacedImage]:
        """Return unencoded images with tokens from `start` to `stop`."""
        return [one for one in self._left if one.encoded is None and _touches(one, start, stop)]

    def to_encode(self) -> list[tuple[int, int, int]]:
        """Return unencoded images as (first token, end, rows)."""
        return [(int(i.tokens[0]), int(i.tokens[-1]) + 1, len(i.tokens)) for i in self._left if i.encoded is None]

    def spans(self, start: int, stop: int) -> list[tuple[int, Tensor, Tensor | None]]:
        """Return (token from `start`, rows, deep rows) of image tokens, all encoded."""
        found = []
        for one in self._left:
            if not _touches(one, start, stop):
                continue
            assert one.encoded is not None
            for token, row, count in one.runs:
                first, last = max(token, start), min(token + count, stop)
                if first < last:
                    rows = slice(row + first - token, row + last - token)
                    deep = one.encoded.deep
                    found.append((first - start, one.encoded.rows[rows], None if deep is None else deep[:, rows]))
        return found

    def pictures(self, start: int, stop: int) -> list[tuple[int, Encoded]]:
        """Return (first token from `start`, encoding) for cross attention, all encoded."""
        found = []
        for one in self._left:
            if _touches(one, start, stop):
                assert one.encoded is not None
                found.append((int(one.tokens[0]) - start, one.encoded))
        return found

    @property
    def whole(self) -> list[tuple[int, int]]:
        """Return (first token, end) within which chunks must not end: their tokens see each other."""
        return [(int(i.tokens[0]), int(i.tokens[-1]) + 1) for i in self._images] if self.sight == "image" else []

    def chunk_end(self, start: int, end: int, rows: int, *, takes_any: bool) -> tuple[int, int]:
        """End a chunk outside of indivisible images, and before one that exceeds `rows` to encode."""
        return encoder_end(start, chunk_end(start, end, self.whole), self.to_encode(), rows, takes_any=takes_any)

    def reach(self, start: int, stop: int) -> tuple[Indices, Indices] | None:
        """Return the last and first keys (-1: as the layer) that tokens see; None: causal."""
        if self.sight is None or start >= self.length:
            return None
        tokens = np.arange(start, stop, dtype=np.int64)
        firsts = np.full_like(tokens, -1)
        if self.sight == "prompt":
            in_prompt = tokens < self.length
            return np.where(in_prompt, self.length - 1, tokens), np.where(in_prompt, 0, firsts)
        lasts = tokens.copy()
        for first, behind in self.whole:
            inside = (tokens >= first) & (tokens < behind)
            lasts[inside] = behind - 1
            if self.sight_past_windows:
                firsts[inside] = first
        return None if (lasts == tokens).all() else (lasts, firsts)

    def has_sections(self, start: int, stop: int) -> bool:
        """Whether some token has three different positions."""
        return self._positions is not None and any(one.start < stop and start < one.stop for one in self._images)

    def offset_at(self, token: int) -> int:
        """Return how far positions are ahead from `token` on."""
        if self._positions is None or token >= self._positions.shape[1]:
            return self.offset
        return int(self._positions[0, token]) - token

    def positions(self, start: int, stop: int) -> Indices:
        """Return positions [3, n] int64, generated tokens included."""
        counted = np.broadcast_to(np.arange(start, stop, dtype=np.int64) + self.offset, (3, stop - start))
        if self._positions is None or start >= self._positions.shape[1]:
            return counted
        known = self._positions[:, start:stop]
        return np.concatenate([known, counted[:, known.shape[1] :]], axis=1)

    def pass_by(self, cache_length: int) -> None:
        """Drop what cached tokens do not need."""
        if self._left and self._left[0].stop <= cache_length:
            for one in self._left:
                if one.stop <= cache_length:
                    one.encoded = one.image = None
            self._left = [one for one in self._left if one.stop > cache_length]


def check_places(request_id: int, places: Rows[ImagePlace], prompt_length: int, cache_length: int) -> None:
    """Refuse places out of order or prompt, or unsent and uncached."""
    end = 0
    for place in places:
        if len(place.key) != KEY_BYTES:
            raise RequestError(f"request {request_id}: the key of an image has {len(place.key)} bytes")
        if place.length < 1 or place.start < end or place.stop > prompt_length:
            raise RequestError(
                f"request {request_id}: an image at tokens {place.start} to {place.stop} of {prompt_length}; images "
                "must be in order, apart and in the prompt"
            )
        end = place.stop
        if place.stop > cache_length and (place.image is None or not place.image.features):
            raise RequestError(f"request {request_id}: the image at token {place.start} was not sent")


def _sections(places: Rows[ImagePlace], tokens: Rows[Indices], length: int) -> tuple[Indices, int]:
    """Return positions [3, length] (time, height, width), and their lead at the end.

    Text counts on in all three; after an image the next token follows its largest position.
    """
    positions = np.empty((3, length), np.int64)
    done, position = 0, 0
    for place, found in zip(places, tokens, strict=True):
        grid = () if place.image is None else place.image.grid
        if len(grid) != 3 or int(np.prod(grid)) != len(found):
            raise RequestError(f"the image at token {place.start} has {len(found)} tokens for a grid of {list(grid)}")
        if not len(found) or found[-1] - found[0] != len(found) - 1:
            raise RequestError(f"the image tokens at token {place.start} do not follow one another")
        first = int(found[0])
        positions[:, done:first] = position + np.arange(first - done)
        position += first - done
        done = first + len(found)
        positions[:, first:done] = position + np.indices(grid).reshape(3, -1)
        position += max(grid)
    positions[:, done:] = position + np.arange(length - done)
    return positions, position + length - done - length


def _touches(one: PlacedImage, start: int, stop: int) -> bool:
    return bool(one.tokens[0] < stop and one.tokens[-1] >= start)


def _check(family: VisionFamily, place: ImagePlace, num_tokens: int) -> None:
    image = place.image
    if image is None:
        return
    if num_tokens != image.num_embeds or num_tokens == 0:
        raise RequestError(
            f"the image at token {place.start} has {image.num_embeds} embeddings for {num_tokens} image tokens"
        )
    if not image.features:
        return
    names = set(image.features)
    unknown, missing = names - set(family.features), set(family.features) - set(family.optional) - names
    if unknown or missing:
        raise RequestError(
            f"the image at token {place.start} has features {sorted(names)}; this model reads {list(family.features)}"
        )
    for name, feature in image.features.items():
        feature.check(name)
