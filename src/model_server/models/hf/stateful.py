"""transformers' modelling with a cache per request: slow, but always correct.

For state-space models, hybrids, encoder-decoders, and what the paged cache cannot express.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model_server.errors import RequestError, StartupError
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.hf.crossing import Arguments, CrossAttention, Pictures, cross_attention_of
from model_server.models.hf.positions import LengthRotary
from model_server.runner.runner import STATE_BLOCK_SIZE, ModelInputs, RequestState, RunnerTraits

# What models call the object that carries a request from one forward to the next: transformers before 5.24 (and code of
# repositories), its state spaces, RWKV, and all others since 5.24.
_CACHE_NAMES = ("past_key_values", "cache_params", "state", "cache")


# Layers of this type see all of the prompt, and a window of what was generated.
_OF_PROMPTS = "reference_sliding_attention"
# Types that compute several generated tokens at once otherwise than one after another, as `generate` does: CPM-Ant's
# see each other, and ProphetNet's get one another's biases.
_ONE_BY_ONE = ("cpmant", "prophetnet")
# Types whose forward takes all tokens, and skips those that its cache has.
_TAKES_ALL = ("cpmant",)


@dataclass(slots=True)
class _Kept:
    """A request between two forwards."""

    # Tokens seen, without those before a decoder's first.
    length: int
    cache: Any
    encoded: Any = None  # what the encoder made of the prompt
    ids: Tensor | None = None  # all tokens, if each forward takes them
    # Further arguments of each forward of one token.
    always: Arguments = field(default_factory=dict)


class StatefulRunner:
    """A transformers model that keeps states, a `runner.Runner`; used inside `torch.inference_mode`."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        max_positions: int | None,
        rotaries: Sequence[LengthRotary],
        *,
        recomputes: bool = False,
    ) -> None:
        """Run the model on a few tokens to learn its widths.

        Args:
            recomputes: The state is the tokens so far, which are computed again each step.
        """
        self.model = model
        self._device = device
        self._max_positions = max_positions
        self._rotaries = rotaries
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)
        self._recomputes = recomputes
        if self._cache_name is None and not recomputes:
            raise StartupError(f"{type(model).__name__} keeps nothing between two steps")
        self.cross = cross_attention_of(model)
        self._picks_rows = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        # What `generate` asks, too: some models insist on a cache class of their own.
        self._takes_dynamic_cache = getattr(type(model), "_supports_default_dynamic_cache", lambda: True)()
        self._prefix = decoder_prefix(model) if model.config.is_encoder_decoder else None
        types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
        self.one_by_one = model.config.model_type in _ONE_BY_ONE
        self._takes_all = model.config.model_type in _TAKES_ALL
        self._keeps_prompts = self.one_by_one or _OF_PROMPTS in types
        self._vocab_size, state_bytes = self._measure(STATE_BLOCK_SIZE)
        # Tokens whose state is as large as an image's part.
        self.image_reserve = 0 if self.cross is None else self._image_reserve(self.cross, state_bytes)
        self.traits = RunnerTraits(state_bytes=state_bytes, decoder_prefix=self._prefix)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return ()

    def set_longest(self, longest: int) -> None:
        """Rotations that depend on it are chosen."""
        for rotary in self._rotaries:
            rotary.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        """Nothing: its steps are not captured."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Compute logits; `cache` has no layers. An encoder-decoder's prompt rows but the last are NaN."""
        metadata = inputs.attention
        wanted = None if inputs.logit_rows is None else inputs.logit_rows.tolist()
        picked: dict[int, Tensor] = {}
        row = 0
        for state, count, length in zip(
            inputs.states, metadata.query_lengths_host, metadata.kv_lengths_host, strict=True
        ):
            ids = inputs.input_ids[row : row + count]
            local = (
                list(range(count)) if wanted is None else sorted({w - row for w in wanted if row <= w < row + count})
            )
            pictures = [(place - row, states) for place, states in inputs.cross_states if row <= place < row + count]
            found = self._advance(state, ids, length - count, local, pictures)
            for place, logits in zip(local, found, strict=True):
                picked[row + place] = logits
            row += count
        order = range(row) if wanted is None else wanted
        return torch.stack([picked[i] for i in order]).float()

    def _advance(
        self, state: RequestState, ids: Tensor, start: int, wanted: list[int], pictures: Pictures = ()
    ) -> Tensor:
        """Take in `ids` [n] from position `start` on; return logits [len(wanted), vocab]."""
        if start == 0:
            state.kept = None
        kept: _Kept | None = state.kept
        if start != (0 if kept is None else kept.length):
            raise RequestError(f"a step begins at token {start}, but the request's state has another length")
        if self._prefix is not None:
            return self._decode(state, ids, start, wanted)
        if self._recomputes:
            return self._recompute(state, ids, start, wanted)
        prompt = state.prompt_length
        if self._keeps_prompts and start == 0 and 0 < prompt < len(ids):
            cuts = range(prompt, len(ids)) if self.one_by_one else [prompt]
            return self._advance_parts(state, ids.tensor_split(list(cuts)), wanted)
        arguments: dict[str, Any] = {"input_ids": ids.unsqueeze(0)}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + len(ids), device=ids.device).unsqueeze(0)
        if kept is None:
            kept = _Kept(0, self._new_cache())
            if self.cross is not None:
                first, kept.always = self.cross.arguments(ids, pictures)
                arguments |= first
        elif kept.always:
            if len(ids) != 1:
                raise RequestError("behind a prompt with images a step has one token")
            arguments |= kept.always
        if self._takes_all:
            kept.ids = ids if kept.ids is None else torch.cat([kept.ids, ids])
            arguments["input_ids"] = kept.ids.unsqueeze(0)
        logits = self._call(kept, arguments, len(ids), wanted)
        state.kept = kept
        return logits

    def _advance_parts(self, state: RequestState, parts: Sequence[Tensor], wanted: list[int]) -> Tensor:
        """Take in a prompt, then what had been generated before a preemption: what comes first counts as the prompt."""
        found = []
        for first, part in _numbered(parts):
            local = [place - first for place in wanted if first <= place < first + len(part)]
            found.append(self._advance(state, part, first, local))
        return torch.cat(found)

    def of_text(self, ids: Tensor) -> Arguments:
        """Return further arguments of a forward of a whole text `ids` [n]."""
        return {} if self.cross is None else self.cross.arguments(ids, ())[0]

    def _recompute(self, state: RequestState, ids: Tensor, start: int, wanted: list[int]) -> Tensor:
        kept: _Kept | None = state.kept
        ids = ids.clone() if kept is None else torch.cat([kept.cache, ids])
        output = self.model(input_ids=ids.unsqueeze(0), **({"use_cache": False} if self._cache_name else {}))
        state.kept = _Kept(len(ids), ids)
        rows = torch.tensor([start + place for place in wanted], dtype=torch.int64, device=self._device)
        logits: Tensor = output.logits[0]
        return logits.index_select(0, rows)

    def _decode(self, state: RequestState, ids: Tensor, start: int, wanted: list[int]) -> Tensor:
        """Give the prompt to the encoder, prefix and generated tokens to the decoder."""
        assert self._prefix is not None
        kept: _Kept | None = state.kept
        count = len(ids)
        skipped, shift = 0, 0
        if kept is None:
            if count < state.prompt_length:
                raise RequestError("an encoder takes its prompt as a whole")
            prompt, ids = ids[: state.prompt_length], ids[state.prompt_length :]
            encoded = self.model.get_encoder()(
                input_ids=prompt.unsqueeze(0), attention_mask=torch.ones_like(prompt).unsqueeze(0), return_dict=True
            )
            kept = _Kept(0, None, encoded)
            ids = torch.cat([torch.tensor(self._prefix, dtype=ids.dtype, device=ids.device), ids])
            # The last token of the prompt and the last of the prefix are followed by the first generated one.
            skipped, shift = state.prompt_length - 1, len(self._prefix) - 1
        local = [place - skipped + shift for place in wanted if place >= skipped]
        arguments = {
            "encoder_outputs": kept.encoded,
            "attention_mask": torch.ones(kept.encoded[0].shape[:2], dtype=torch.int64, device=ids.device),
        }
        found = []
        for first, part in _numbered(ids.tensor_split(len(ids)) if self.one_by_one else [ids]):
            rows = [place - first for place in local if first <= place < first + len(part)]
            found.append(self._call(kept, arguments | {"decoder_input_ids": part.unsqueeze(0)}, 0, rows))
        logits = torch.cat(found)
        kept.length += count
        state.kept = kept
        unknown = logits.new_full((len(wanted) - len(local), logits.shape[1]), float("nan"))
        return torch.cat([unknown, logits])

    def _call(self, kept: _Kept, arguments: dict[str, Any], num_new: int, wanted: list[int]) -> Tensor:
        assert self._cache_name is not None
        rows = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        if self._picks_rows:
            arguments["logits_to_keep"] = rows
        if kept.cache is not None:
            arguments[self._cache_name] = kept.cache
        output = self.model(**arguments, use_cache=True, return_dict=True)
        kept.cache = getattr(output, self._cache_name, None)
        if kept.cache is None:
            raise RequestError(f"{type(self.model).__name__} returned no `{self._cache_name}`")
        kept.length += num_new
        logits: Tensor = output.logits[0]
        return logits if self._picks_rows else logits.index_select(0, rows)

    def _new_cache(self) -> Any:
        """Make an empty cache for the layers; None: the model makes its own."""
        if self._cache_name not in ("past_key_values", "cache") or not self._takes_dynamic_cache:
            return None
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _measure(self, num_tokens: int) -> tuple[int, int]:
        """Return the logits' width, and bytes that a block's worth of tokens keeps."""
        # A state has a fixed part and one that grows by the token, so requests of several blocks keep less per block.
        state, logits = self._state_of(num_tokens)
        return logits.shape[-1], max(_tensor_bytes(state.kept, set()), 1)

    def _image_reserve(self, cross: CrossAttention, state_bytes: int) -> int:
        """Return tokens whose state is as large as one image's."""
        blank = cross.blank()
        one, two = (self._state_of(STATE_BLOCK_SIZE, [(i, blank) for i in range(count)])[0] for count in (1, 2))
        num_bytes = _tensor_bytes(two.kept, set()) - _tensor_bytes(one.kept, set())
        return max(-(-num_bytes * STATE_BLOCK_SIZE // state_bytes), 0)

    def _state_of(self, num_tokens: int, pictures: Pictures = ()) -> tuple[RequestState, Tensor]:
        """Return a state of so many tokens, and the last logits."""
        state = RequestState(num_tokens)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        return state, self._advance(state, ids, 0, [num_tokens - 1], pictures)


def decoder_prefix(model: Any) -> tuple[int, ...]:
    """Return a decoder's start token, and one that must follow, if any."""
    generation = getattr(model, "generation_config", None)

    def setting(name: str) -> int | None:
        value = getattr(generation, name, None)
        for config in (model.config, model.config.get_text_config(decoder=True)):
            value = getattr(config, name, None) if value is None else value
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, int) else None

    start = setting("decoder_start_token_id")
    start = setting("bos_token_id") if start is None else start
    if start is None:
        raise StartupError("config.json names no `decoder_start_token_id`: the decoder has no start token")
    forced = setting("forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def _numbered(parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Pair each part with how many tokens are before it."""
    start = 0
    for part in parts:
        yield start, part
        start += len(part)


def _tensor_bytes(value: Any, seen: set[int]) -> int:
    """Count the bytes of all tensors inside, each once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_tensor_bytes(v, seen) for v in value.values())
    if isinstance(value, list | tuple | set):
        return sum(_tensor_bytes(v, seen) for v in value)
    if isinstance(value, _Kept):
        return _tensor_bytes((value.cache, value.encoded, value.ids, value.always), seen)
    if "Cache" in type(value).__name__ and hasattr(value, "__dict__"):  # a cache or a layer of one
        return _tensor_bytes(vars(value), seen)
    return _tensor_bytes(vars(value), seen) if type(value).__name__.endswith("Layer") else 0
