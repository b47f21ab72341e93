"""transformers' modelling over our paged cache: our attention, registered by name, on a flattened batch.

The step travels in a context variable: not every model passes keyword arguments on.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from model_server.adapters.rows import CurrentRows
from model_server.attention.backend import AttentionLayer, AttentionStep
from model_server.attention.choice import AttentionChoice
from model_server.errors import ModelServerError
from model_server.memory.kv_cache import FLOAT8, KvCache, KvShape
from model_server.models.hf.loading import attention_of_text
from model_server.models.hf.positions import LengthRotary
from model_server.runner.runner import ModelInputs, RunnerTraits

ATTENTION_NAME = "tercet_paged"


class UnsuitableError(ModelServerError):
    """Why this model cannot run over the paged cache."""


class _Call(Protocol):
    """Answers the attention calls of one forward."""

    def attend(self, module: Any, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend query, key, value [num_tokens, heads, dim] to [num_tokens, num_heads * value_dim]."""


_call: ContextVar[_Call] = ContextVar("paged_attention_call")


def register() -> None:
    """Register our attention; transformers builds no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions: [1, heads, num_tokens, dim] to [1, num_tokens, heads, dim].

    Raises:
        UnsuitableError: The paged cache cannot express it.
    """
    if attention_mask is not None or position_bias is not None:
        raise UnsuitableError("its attention adds a mask or a bias of its own to the scores")
    if query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise UnsuitableError("its keys are not those of the step's own tokens")
    layer = AttentionLayer(
        index=module.layer_idx,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        chunk=_chunk(module),
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        value_dim=value.shape[3],
    )
    attended = _call.get().attend(
        module, layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return attended.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _chunk(module: Any) -> int | None:
    """Return llama4's chunk, which else only its mask shows."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if config is None or types is None or types[module.layer_idx] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


class _Probe:
    """Notes what attention is asked for in one forward, and answers zeros."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.shapes: list[KvShape] = []
        self.layers: list[AttentionLayer] = []

    def attend(self, module: Any, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if getattr(module, "is_causal", True) is False:
            raise UnsuitableError("its attention is not causal")
        self.indices.append(layer.index)
        self.layers.append(layer)
        self.shapes.append(KvShape(layer.num_kv_heads, layer.head_dim, value.shape[2]))
        return query.new_zeros(query.shape[0], layer.num_heads * value.shape[2])


@dataclass(frozen=True, slots=True)
class _Step:
    """One forward over the paged cache."""

    slots: Tensor
    cache: KvCache
    attention: AttentionStep
    positions: Tensor  # [num_tokens] int64
    temperatures: dict[int, tuple[float, float]]

    def attend(self, module: Any, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer.index in self.temperatures:
            length, weight = self.temperatures[layer.index]
            factors = torch.log1p(torch.floor((self.positions.float() + 1) / length)) * weight + 1
            query = (query * factors.view(-1, 1, 1)).to(query.dtype)
        dtype = self.cache.rows[layer.index].dtype
        if key.dtype != dtype and dtype not in FLOAT8:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        self.cache.write(layer.index, self.slots, key, value)
        return self.attention.attend(layer, query, key, value)


def _temperatures(model: Any) -> dict[int, tuple[float, float]]:
    """Return (floor_scale, attn_scale) of llama4's layers without rotary positions."""
    # Their queries grow with the position, which the modelling takes from the place in the flattened batch. Within
    # floor_scale the factor is 1 for all; beyond, we make up for the difference, and the modelling must not do it too.
    found = {}
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and getattr(module, "use_rope", True) in (False, 0):
            module.attn_temperature_tuning = False
            found[module.layer_idx] = (float(module.floor_scale), float(module.attn_scale))
    return found


def _check_windows(config: Any, windows: list[int | None], max_positions: int | None) -> None:
    """Refuse windows that only the mask knows: they would be lost in longer sequences."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return
    if max_positions is not None and window >= max_positions:
        return
    types = getattr(config, "layer_types", None)
    if types is None:
        lost = not any(windows)
    else:
        lost = any(t == "sliding_attention" and not w for t, w in zip(types, windows, strict=False))
    if lost:
        raise UnsuitableError("its sliding window does not reach the attention")


class TransformersRunner:
    """A transformers model as a `runner.Runner`; used inside `torch.inference_mode`."""

    def __init__(
        self,
        model: Any,
        attention: AttentionChoice,
        device: torch.device,
        max_positions: int | None,
        rotaries: Sequence[LengthRotary],
    ) -> None:
        """Run the model once on two tokens.

        Args:
            rotaries: Of its modules that depend on the length.

        Raises:
            UnsuitableError: It cannot run over the paged cache.
        """
        self.model = model
        self._rotaries = rotaries
        self._max_positions = max_positions
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise UnsuitableError("it takes no positions")
        self._picks_rows = "logits_to_keep" in accepted
        self._temperatures = _temperatures(model)
        probe = _Probe()
        tokens = torch.zeros(2, dtype=torch.int64, device=device)
        logits = self._run(probe, tokens, torch.arange(2, device=device), None)
        if probe.indices != list(range(len(probe.indices))) or not probe.indices:
            raise UnsuitableError("not every layer calls attention exactly once, in order")
        windows = [layer.window for layer in probe.layers]
        _check_windows(model.config.get_text_config(decoder=True), windows, max_positions)
        self._backend = attention.for_layers(probe.layers)
        self.traits = RunnerTraits(attention=self._backend)  # see `allow_capture`
        self._adapters = CurrentRows()
        self._vocab_size = logits.shape[-1]
        self._kv_shapes = tuple(probe.shapes)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._kv_shapes

    @contextlib.contextmanager
    def given_back(self) -> Iterator[Any]:
        """Give the model its eager attention and experts for the block."""
        model = self.model
        experts = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None
        model.set_attn_implementation("eager")
        self.give_back()
        try:
            if experts is not None:
                model.set_experts_implementation("eager")
            yield model
        finally:
            model.set_attn_implementation(attention_of_text(model.config, ATTENTION_NAME))
            self._temperatures = _temperatures(model)
            if experts is not None:
                model.set_experts_implementation(experts)

    def give_back(self) -> None:
        """Undo this runner's changes of the model."""
        for module in self.model.modules():
            if getattr(module, "layer_idx", None) in self._temperatures and hasattr(module, "attn_temperature_tuning"):
                module.attn_temperature_tuning = True

    @property
    def may_be_capturable(self) -> bool:
        """Nothing known speaks against it."""
        return self._backend.capturable and not self.traits.adapters

    def adapt(self, current: CurrentRows, names: tuple[str, ...]) -> None:
        """Write the rows of each step to `current` from now on."""
        self._adapters = current
        self.traits = replace(self.traits, adapters=names)

    def allow_capture(self) -> None:
        """Let its traits allow captures."""
        self.traits = replace(self.traits, capturable=True)

    def set_longest(self, longest: int) -> None:
        """Rotations that depend on it are chosen."""
        for rotary in self._rotaries:
            rotary.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        """Nothing: it has no tables by position."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        metadata = inputs.attention
        attention = inputs.attention_step or self._backend.start(metadata, cache)
        step = _Step(metadata.slots, cache, attention, inputs.positions, self._temperatures)
        self._adapters.rows = inputs.adapters
        logits = self._run(step, inputs.input_ids, inputs.positions, inputs.logit_rows)
        return logits.float() if inputs.output is None else inputs.output.copy_(logits)

    def _run(self, call: _Call, ids: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """Return logits in the model's type."""
        picked = {"logits_to_keep": rows} if rows is not None and self._picks_rows else {}
        token = _call.set(call)
        try:
            output = self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                return_dict=True,
                **picked,
            )
        finally:
            _call.reset(token)
        logits = output.logits[0]
        if rows is not None and not picked:
            logits = logits.index_select(0, rows)
        return logits  # type: ignore[no-any-return]
