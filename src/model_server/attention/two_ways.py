"""Attention of layers that see ahead: each as far as its window says, or those with a window alone."""

from __future__ import annotations

from torch import Tensor

from model_server.attention.backend import AttentionLayer, AttentionStep


class TwoWays:
    """Attention over whole texts, and over windows that reach ahead as far as back."""

    def __init__(self, whole: AttentionStep, windows: dict[int, AttentionStep]) -> None:
        self.whole = whole
        self.windows = windows

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        step = self.whole if layer.window is None else self.windows[layer.window]
        return step.attend(layer, query, key, value)


class AheadInWindows:
    """Causal attention, but for layers with a window."""

    def __init__(self, causal: AttentionStep, ahead: AttentionStep) -> None:
        self._causal = causal
        self._ahead = ahead

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        step = self._causal if layer.window is None else self._ahead
        return step.attend(layer, query, key, value)
