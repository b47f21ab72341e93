"""Chooses the attention backend: each is an `Offer` of a function that says why it is unavailable.

Only those functions import kernels and libraries that may be missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model_server.attention.availability import UnavailableError
from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.reference import ReferenceBackend
from model_server.errors import StartupError
from model_server.kernels.availability import has_float8, refusal

logger = logging.getLogger(__name__)

# What `--attention` and ATTENTION accept: our own names, then TGI's.
OWN_NAMES = ("reference", "triton", "flash_attn", "torch_varlen", "cpp")
TGI_NAMES = ("paged", "flashdecoding", "flashdecoding-ipex", "flashinfer")

# Where the model brings its own attention, or none.
OF_THE_MODEL = "transformers"

# Backends that read no cache in float8.
KEEP_MODEL_TYPE = ("flash_attn", "torch_varlen")

# The best first; the reference serves everything everywhere. What a user has to name is not among them.
PREFERENCE = {
    "cuda": ("triton", "flash_attn", "torch_varlen", "reference"),
    "cpu": ("cpp", "reference"),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """An available backend."""

    backend: AttentionBackend
    # Why it cannot serve a layer, after its name in a sentence; None: it can.
    refuses: Callable[[AttentionLayer], str | None]

    def refusal(self, layers: Sequence[AttentionLayer]) -> str | None:
        """Return its refusal of the first such layer."""
        for layer in layers:
            reason = self.refuses(layer)
            if reason is not None:
                return f"cannot serve layer {layer.index} of this model: `{self.backend.name}` {reason}"
        return None


class AttentionChoice:
    """What the user asked for, on this device and in this type."""

    def __init__(
        self,
        requested: str | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Resolve the user's word.

        Args:
            requested: `--attention`, or None. TGI's names mean the best available; others are used or refused.
            cache_dtype: Of the KV cache if it is not `dtype`.
            batch_invariant: On a GPU only `triton` will do.

        Raises:
            StartupError: The word is unknown, or its backend unavailable.
        """
        if requested is not None and requested not in OWN_NAMES + TGI_NAMES:
            raise StartupError(f"--attention {requested} is unknown; choose one of {', '.join(OWN_NAMES + TGI_NAMES)}")
        self.requested = requested
        self._device = device
        self._dtype = dtype
        self._cache_dtype = cache_dtype
        self._batch_invariant = batch_invariant
        self._invariant = batch_invariant and device.type == "cuda"
        if self._invariant and requested in OWN_NAMES and requested != "triton":
            raise StartupError(f"--attention {requested} is not batch-invariant; leave it unset or use triton")
        if requested in OWN_NAMES:
            _named(requested, device, dtype, cache_dtype, ())

    def for_layers(self, layers: Sequence[AttentionLayer] = ()) -> AttentionBackend:
        """Choose for the attention layers of all ranks; empty if unknown.

        Raises:
            StartupError: The user's backend cannot serve them.
        """
        if self._invariant:
            _named("triton", self._device, self._dtype, self._cache_dtype, layers)
            from model_server.attention.triton_paged import TritonBackend

            return TritonBackend(batch_invariant=True)
        if self.requested in OWN_NAMES:
            return _named(self.requested, self._device, self._dtype, self._cache_dtype, layers)
        backend = _best(self._device, self._dtype, self._cache_dtype, layers)
        if self.requested is not None:
            name, place = backend.name, self._device.type
            logger.info("Attention `%s` is served by the `%s` backend on %s", self.requested, name, place)
        return backend

    def log(self, backend: AttentionBackend | None, *, caching_asked: bool, encodes: bool = False) -> None:
        """Log the backend in TGI's wording, and each rule that decided.

        Args:
            backend: None for a model with its own attention, or none.
            caching_asked: PREFIX_CACHING.
            encodes: An encoder reads prompts.
        """
        name = OF_THE_MODEL if backend is None else backend.name
        is_cached = caching_asked and backend is not None and not encodes
        logger.info("Using attention %s - Prefix caching %s", name, "true" if is_cached else "0")
        if backend is None:
            logger.info("Attention %s: it keeps a state for each request, which no backend serves", name)
            logger.info("Prefix caching is off: a state cannot be shared")
            return
        logger.info("Attention %s: %s", name, self._reason(name))
        if encodes:
            logger.info("Prefix caching is off: an encoder sees all of a prompt")
        elif not caching_asked:
            logger.info(
                "Prefix caching is off: %s", "--batch-invariant" if self._batch_invariant else "PREFIX_CACHING=0"
            )

    def _reason(self, name: str) -> str:
        if self._invariant:
            return "the only batch-invariant one (`--batch-invariant`)"
        if self.requested is None:
            return "the best available backend that serves the model's layers"
        if self.requested == name:
            return "set by `--attention` or ATTENTION"
        return f"the best available backend, as `{self.requested}` asks"


def _offer(name: str, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> Offer:
    """Raises UnavailableError."""
    if cache_dtype is not None and name in KEEP_MODEL_TYPE:
        raise UnavailableError("it keeps its cache in the model's type")
    if name == "triton" and cache_dtype is torch.float8_e4m3fn and not has_float8(device):
        raise UnavailableError("it reads a cache in float8_e4m3fn on GPUs of capability 8.9 or later")
    return _OFFERS[name](device, dtype)


def _named(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    layers: Sequence[AttentionLayer],
) -> AttentionBackend:
    if cache_dtype is not None and name in KEEP_MODEL_TYPE:
        raise StartupError(
            f"--attention {name} keeps its cache in the model's type; leave --kv-cache-dtype out or use triton"
        )
    try:
        offer = _offer(name, device, dtype, cache_dtype)
    except UnavailableError as unavailable:
        raise StartupError(f"--attention {name} cannot be used: {unavailable}") from None
    refusal = offer.refusal(layers)
    if refusal is not None:
        raise StartupError(f"--attention {name} {refusal}; leave it unset")
    return offer.backend


def _best(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None, layers: Sequence[AttentionLayer]
) -> AttentionBackend:
    shortfalls = []
    for name in PREFERENCE.get(device.type, ("reference",)):
        try:
            offer = _offer(name, device, dtype, cache_dtype)
        except UnavailableError as unavailable:
            logger.debug("Attention backend `%s` is not available: %s", name, unavailable)
            shortfalls.append(f"no `{name}` ({unavailable})")
            continue
        refusal = offer.refusal(layers)
        if refusal is not None:
            shortfalls.append(f"`{name}` {refusal}")
        else:
            _report(name, device, shortfalls)
            return offer.backend
    raise AssertionError("the reference serves everything")


def _report(name: str, device: torch.device, shortfalls: Sequence[str]) -> None:
    """Warn of every choice except a GPU's first."""
    if not shortfalls or device.type == "cpu":
        return
    slow = ", which is slow" if name == "reference" else ""
    logger.warning("Attention is computed by the `%s` backend%s: %s", name, slow, "; ".join(shortfalls))


def _reference(device: torch.device, dtype: torch.dtype) -> Offer:
    # Windows of drafts that a GPU checks have lengths that only the device knows.
    return Offer(ReferenceBackend(exact=device.type == "cpu"), lambda layer: None)


def _triton(device: torch.device, dtype: torch.dtype) -> Offer:
    reason = refusal(device)
    if reason is not None:
        raise UnavailableError(f"it needs Triton and a GPU of capability 8.0 or later; {reason}")
    from model_server.attention import flash_prefill, triton_paged

    return Offer(triton_paged.TritonBackend(prefill=flash_prefill.installed(device)), triton_paged.refuses)


def _flash_attn(device: torch.device, dtype: torch.dtype) -> Offer:
    from model_server.attention import flash_attn

    backend = flash_attn.available(device, dtype)
    return Offer(backend, backend.refuses)


def _torch_varlen(device: torch.device, dtype: torch.dtype) -> Offer:
    from model_server.attention import torch_varlen

    backend = torch_varlen.available(device, dtype)
    return Offer(backend, backend.refuses)


def _cpp(device: torch.device, dtype: torch.dtype) -> Offer:
    """Offer the C++ operators, which hand what they do not know to the reference."""
    if device.type != "cpu":
        raise UnavailableError(f"it computes on a CPU, not on {device.type}")
    if importlib.util.find_spec("model_server.attention.cpp") is None:
        raise UnavailableError("this build has no C++ operators")
    module: Any = importlib.import_module("model_server.attention.cpp")
    if not module.available(device):
        raise UnavailableError("the C++ operators could not be built here")
    return Offer(module.CppBackend(), lambda layer: None)


_OFFERS: dict[str, Callable[[torch.device, torch.dtype], Offer]] = {
    "reference": _reference,
    "triton": _triton,
    "flash_attn": _flash_attn,
    "torch_varlen": _torch_varlen,
    "cpp": _cpp,
}
