"""sentence-transformers, which pads; it sorts texts by length first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def load(model: str, dtype: str) -> Callable[[Sequence[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: loaded.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
