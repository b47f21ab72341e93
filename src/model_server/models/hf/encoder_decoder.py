"""transformers' encoder-decoders in batches: an encoder for a step's prompts, and the decoder over our paged cache."""

# The decoder's rows are flattened. What its layers make of the encoder's output is in the prompt's blocks, its own keys
# and values are in those behind (`wire.decoder_blocks`), and attention reads both through the request's block table.

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model_server.attention.backend import AttentionLayer, AttentionStep
from model_server.attention.choice import AttentionChoice
from model_server.memory.kv_cache import FLOAT8, KvCache, KvShape
from model_server.models.hf.decoder_rows import DecoderRows, RowLayout
from model_server.models.hf.paged import UnsuitableError
from model_server.models.hf.positions import LengthRotary
from model_server.models.hf.stateful import decoder_prefix
from model_server.models.hf.step_modules import StepModules
from model_server.runner.runner import ModelInputs, RunnerTraits

ATTENTION_NAMES = {True: "tercet_crossing_sdpa", False: "tercet_crossing_eager"}
"""Our attention for models that support torch's scaled dot product, and for others."""

# Prompts are padded to the longest of a group, within this share of their tokens, or up to so many.
_PADDED_SHARE, _PADDED_TOKENS = 1.25, 512


class _Call(Protocol):
    """Answers the attention calls of one forward of the decoder."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Attend query, key, value [n, heads, dim] to [n, num_heads * value_dim]."""


_call: ContextVar[_Call | None] = ContextVar("decoder_attention_call", default=None)


def register(rank: int = 0) -> None:
    """Register our attention; outside of the decoder's steps it is transformers' own, for this rank's heads."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    for fused, name in ATTENTION_NAMES.items():
        AttentionInterface.register(name, _attention(rank, fused=fused))
        AttentionMaskInterface.register(name, _masking(sdpa_mask if fused else eager_mask))


def _masking(make: Any) -> Any:
    def mask(*arguments: Any, **options: Any) -> Tensor | None:
        return None if _call.get() is not None else make(*arguments, **options)

    return mask


def _attention(rank: int, *, fused: bool) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        call = _call.get()
        if call is not None:
            return _attended(call, module, query, key, value, mask, options)
        bias = options.get("position_bias")
        if bias is not None and bias.shape[1] > query.shape[1]:
            options["position_bias"] = bias[:, rank * query.shape[1] :][:, : query.shape[1]]
        modelling: Any = inspect.getmodule(type(module))
        own = sdpa_attention_forward if fused else modelling.eager_attention_forward
        return own(module, query, key, value, mask, **options)

    return attend


def _attended(
    call: _Call, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attend [1, heads, n, dim] to [1, n, heads, dim]."""
    if mask is not None:
        raise UnsuitableError("its decoder adds a mask of its own to the scores")
    attended = call.attend(module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options)
    return attended.view(1, query.shape[2], query.shape[1], value.shape[3]), None


@dataclass(frozen=True, slots=True)
class _Place:
    """One attention module of the decoder."""

    layer: AttentionLayer
    crosses: bool  # reads the encoder's output


class _Probe:
    """Notes what the decoder asks for in one forward, and answers zeros."""

    def __init__(self, modules: StepModules, num_queries: int, num_encoded: int) -> None:
        self.places: dict[int, _Place] = {}  # by the module's id
        self.shapes: list[KvShape] = []
        self._modules = modules
        self._num_queries, self._num_encoded = num_queries, num_encoded

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        crosses = len(key) == self._num_encoded
        bias = options.get("position_bias")
        if id(module) in self.places:
            raise UnsuitableError("a module of its decoder attends twice")
        if not crosses and len(key) != self._num_queries:
            raise UnsuitableError("its decoder's keys are not those of its own tokens")
        if crosses and bias is not None and bool(bias.any()):
            raise UnsuitableError("its decoder adds biases to what it reads of the encoder")
        layer = AttentionLayer(
            index=module.layer_idx,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[2],
            scale=query.shape[2] ** -0.5 if options.get("scaling") is None else float(options["scaling"]),
            window=None if crosses else options.get("sliding_window"),
            softcap=options.get("softcap"),
            distance_bias=None if crosses or bias is None else self._modules.bias_of(module, query.shape[1]),
        )
        shape = KvShape(layer.num_kv_heads, layer.head_dim, layer.value_dim)
        if not crosses:
            self.shapes.append(shape)
        if layer.index != len(self.shapes) - 1 or shape != self.shapes[-1]:
            raise UnsuitableError("its decoder's layers do not each attend to their own tokens, then to the encoder's")
        self.places[id(module)] = _Place(layer, crosses)
        return query.new_zeros(len(query), layer.num_heads * layer.value_dim)


@dataclass(frozen=True, slots=True)
class _Step:
    """One forward of the decoder over the paged cache."""

    places: dict[int, _Place]
    cache: KvCache
    rows: DecoderRows
    own: AttentionStep
    crossing: AttentionStep

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        place = self.places[id(module)]
        index, slots = place.layer.index, self.rows.encoded_slots if place.crosses else self.rows.own.slots
        dtype = self.cache.rows[index].dtype
        if key.dtype != dtype and dtype not in FLOAT8:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if slots is not None:
            self.cache.write(index, slots, key, value)
        return (self.crossing if place.crosses else self.own).attend(place.layer, query, key, value)


class EncoderDecoderRunner:
    """A transformers encoder-decoder as a `runner.Runner`; used inside `torch.inference_mode`."""

    def __init__(
        self,
        model: Any,
        attention: AttentionChoice,
        device: torch.device,
        max_positions: int | None,
        rotaries: Sequence[LengthRotary],
        *,
        rank: int = 0,
    ) -> None:
        """Run the model once, as `TransformersRunner`.

        Raises:
            UnsuitableError: It cannot run so.
        """
        self.model = model
        self._device = device
        self._rotaries = rotaries
        self._max_positions = max_positions
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "decoder_position_ids" in accepted
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in accepted), "cache")
        self._prefix = decoder_prefix(model)
        self._padding = _padding_id(model.config)
        self._modules = StepModules(_decoder_of(model), max_positions, self._padding, rank)
        try:
            encoded, probe, logits = self._try_out()
        except Exception:
            self.give_back()
            raise
        self._places, self._kv_shapes = probe.places, tuple(probe.shapes)
        # Of steps without prompts: the encoder's output was read before, and the modules compute no keys of it.
        self._read = _read_cache(self._kv_shapes, device, encoded.dtype)
        self._nothing = torch.zeros_like(encoded[:1])
        self._vocab_size = logits.shape[-1]
        self._backend = attention.for_layers([place.layer for place in probe.places.values()])
        self._layout = RowLayout(self._prefix, device)
        self.traits = RunnerTraits(attention=self._backend, decoder_prefix=self._prefix)

    def _try_out(self) -> tuple[Tensor, _Probe, Tensor]:
        """Return what the encoder makes of two tokens, what three of the decoder ask for, and their logits."""
        tokens = torch.zeros(3, dtype=torch.int64, device=self._device)
        probe = _Probe(self._modules, num_queries=3, num_encoded=2)
        encoded = self._encode([tokens[:2]])
        logits = self._decode(probe, tokens, torch.arange(3, device=self._device), encoded)
        if not probe.places or 2 * len(probe.shapes) != len(probe.places):
            raise UnsuitableError("not every layer of its decoder reads the encoder's output once")
        return encoded, probe, logits

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._kv_shapes

    def set_longest(self, longest: int) -> None:
        """Rotations that depend on it are chosen."""
        for rotary in self._rotaries:
            rotary.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        """Nothing: its steps are not captured."""

    def give_back(self) -> None:
        """Undo this runner's changes of the model."""
        self._modules.give_back()

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Compute logits; a prompt's rows but the last are NaN."""
        rows = self._layout.rows(inputs, cache.block_size)
        encoded = self._encode(rows.prompts) if rows.prompts else None
        step = _Step(
            self._places, cache, rows, self._backend.start(rows.own, cache), self._backend.start(rows.crossing, cache)
        )
        logits = self._decode(step, rows.ids, rows.positions, encoded).float()
        if rows.picked is not None:
            logits = logits.index_select(0, rows.picked)
            if rows.unknown is not None:
                logits.masked_fill_(rows.unknown, float("nan"))
        return logits if inputs.output is None else inputs.output.copy_(logits)

    def _encode(self, prompts: Sequence[Tensor]) -> Tensor:
        """Return what the encoder makes of the prompts [n, hidden], one after another."""
        found: dict[int, Tensor] = {}
        encoder = self.model.get_encoder()
        for group in _groups([len(ids) for ids in prompts]):
            longest = max(len(prompts[i]) for i in group)
            ids = torch.full((len(group), longest), self._padding, dtype=torch.int64, device=self._device)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(group):
                ids[row, : len(prompts[i])] = prompts[i]
                mask[row, : len(prompts[i])] = 1
            hidden = encoder(input_ids=ids, attention_mask=mask, return_dict=True).last_hidden_state
            found |= {i: hidden[row, : len(prompts[i])] for row, i in enumerate(group)}
        return torch.cat([found[i] for i in range(len(prompts))])

    def _decode(self, call: _Call, ids: Tensor, positions: Tensor, encoded: Tensor | None) -> Tensor:
        """Return logits [n, vocab] in the model's type; `encoded` is None in a step without prompts."""
        from transformers.modeling_outputs import BaseModelOutput

        if encoded is None:
            options: dict[str, Any] = {self._cache_name: self._read}
            encoded = self._nothing
        else:
            options = {self._cache_name: _passing_cache()}
        if self._takes_positions:
            options["decoder_position_ids"] = positions.unsqueeze(0)
        token = _call.set(call)
        self._modules.now = positions
        try:
            output = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded.unsqueeze(0)),
                decoder_input_ids=ids.unsqueeze(0),
                use_cache=True,
                return_dict=True,
                **options,
            )
        finally:
            self._modules.now = None
            _call.reset(token)
        return output.logits[0]  # type: ignore[no-any-return]


def _passing_cache() -> Any:
    """Make a cache for a step with prompts: it keeps nothing, and hands on the step's own keys."""
    from transformers import DynamicCache, EncoderDecoderCache

    class Passing(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    return EncoderDecoderCache(Passing(), Passing())


def _read_cache(shapes: Sequence[KvShape], device: torch.device, dtype: torch.dtype) -> Any:
    """Make a cache for a step without prompts: it says that keys of the encoder's output are there."""
    from transformers import DynamicCache, EncoderDecoderCache

    crossing = DynamicCache()
    for index, shape in enumerate(shapes):
        key = torch.zeros(1, shape.num_kv_heads, 1, shape.key_dim, dtype=dtype, device=device)
        crossing.update(key, key.new_zeros(1, shape.num_kv_heads, 1, shape.value_dim), index)
    return EncoderDecoderCache(_passing_cache().self_attention_cache, crossing)


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Cut texts of these lengths into groups that are padded to their longest, the shortest first."""
    groups: list[list[int]] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        total += lengths[i]
        if groups and lengths[i] * (len(groups[-1]) + 1) <= max(_PADDED_SHARE * total, _PADDED_TOKENS):
            groups[-1].append(i)
        else:
            groups.append([i])
            total = lengths[i]
    return groups


def _decoder_of(model: Any) -> Any:
    """Return the innermost decoder: of some models it is the language model's."""
    found = model.get_decoder()
    while hasattr(found, "get_decoder") and (within := found.get_decoder()) is not found:
        found = within
    return found


def _padding_id(config: Any) -> int:
    """Return a token that texts may be padded with."""
    found = getattr(config.get_text_config(decoder=False), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else 0
