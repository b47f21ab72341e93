"""What computes a recurrent layer between its products, on a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model_server.cpp.library import usable
from model_server.recurrence.convolution import TorchShortConvolution
from model_server.recurrence.cpp import (
    MOST_KEY_DIM,
    CppDeltaNet,
    CppKeptConvolution,
    CppMamba1,
    CppMamba2,
    CppShortConvolution,
)
from model_server.recurrence.delta_net import DeltaWeights, TorchDeltaNet
from model_server.recurrence.mamba1 import KeptWeights, Mamba1Weights, TorchKeptConvolution, TorchMamba1
from model_server.recurrence.mamba2 import Mamba2Weights, TorchMamba2
from model_server.recurrence.segments import ConvolutionPlan, Segments
from model_server.recurrence.states import LayerStates


class DeltaNet(Protocol):
    """A gated delta net between its products."""

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        """Compute a step, and update the states of its sequences.

        Args:
            projected: [num_tokens, channels, then gates, then a strength for each value head, then decays].

        Returns:
            [num_tokens, value heads * value_dim].
        """


class Mamba1Half(Protocol):
    """Mamba-1 before the product that chooses, or behind those of steps in time."""

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        """Compute a step, and update inputs or states of its sequences.

        Args:
            projected: [num_tokens, inputs, then gates]; of the second half inputs, gates, steps in time, B, C.

        Returns:
            [num_tokens, channels].
        """


class Mamba2Net(Protocol):
    """Mamba-2 between its products."""

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        """Compute a step, and update the states of its sequences.

        Args:
            projected: [num_tokens, gates, then channels, then a step in time for each head].

        Returns:
            [num_tokens, heads * head_dim]; float32, and without gates, if these are the caller's.
        """


class ShortConvolution(Protocol):
    """gate * convolution(gate * x)."""

    def __call__(self, projected: Tensor, segments: Segments, plan: ConvolutionPlan, rows: Tensor) -> Tensor:
        """Compute a step, and keep the newest inputs.

        Args:
            projected: [num_tokens, 3 * channels], which may be overwritten: the gate of the inputs, the gate of the
                sums, the inputs.
            rows: [num_rows, channels], the layer's cache.

        Returns:
            [num_tokens, channels].
        """


def delta_net(weights: DeltaWeights, device: torch.device, dtype: torch.dtype) -> DeltaNet:
    """Choose by the device and the type of activations."""
    if usable(device, dtype) and weights.key_dim <= MOST_KEY_DIM:
        return CppDeltaNet(weights)
    return TorchDeltaNet(weights)


def kept_convolution(weights: KeptWeights, device: torch.device, dtype: torch.dtype) -> Mamba1Half:
    """Choose by the device and the type of activations."""
    return CppKeptConvolution(weights) if usable(device, dtype) else TorchKeptConvolution(weights)


def mamba1(weights: Mamba1Weights, device: torch.device, dtype: torch.dtype) -> Mamba1Half:
    """Choose by the device and the type of activations."""
    if usable(device, dtype) and weights.state_size <= MOST_KEY_DIM:
        return CppMamba1(weights)
    return TorchMamba1(weights)


def mamba2(weights: Mamba2Weights, device: torch.device, dtype: torch.dtype) -> Mamba2Net:
    """Choose by the device and the type of activations."""
    if usable(device, dtype) and weights.state_size <= MOST_KEY_DIM:
        return CppMamba2(weights)
    return TorchMamba2(weights)


def short_convolution(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> ShortConvolution:
    """Choose by the weight's device and the type of activations.

    Args:
        weight: [width, channels] float32.
        bias: [channels] float32; None: there is none.
        dtype: The type of activations.
    """
    if usable(weight.device, dtype):
        return CppShortConvolution(weight, bias)
    return TorchShortConvolution(weight, bias)
