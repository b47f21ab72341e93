"""What a shard has settled on, in the words that watchers of TGI's log look for, with the rule behind each choice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from model_server.attention.backend import AttentionBackend, AttentionLayer

logger = logging.getLogger(__name__)

Substitute = Callable[[AttentionBackend, Sequence[AttentionLayer]], AttentionBackend]


class SettledBackend:
    """Stands for `substitute`, and remembers which backend the model was given in the end."""

    def __init__(self, first: AttentionBackend, substitute: Substitute) -> None:
        self.backend = first
        self._substitute = substitute

    def __call__(self, backend: AttentionBackend, layers: Sequence[AttentionLayer]) -> AttentionBackend:
        self.backend = self._substitute(backend, layers)
        return self.backend


OF_THE_MODEL = "transformers"
"""Where the model brings its own attention, or none."""


def tell_attention(backend: str, asked: str | None, *, caching_asked: bool, keeps_state: bool) -> None:
    """One record in TGI's wording, and one for each rule that decided.

    caching_asked: PREFIX_CACHING. keeps_state: the model keeps a state for each request, which cannot be shared.
    """
    is_cached = caching_asked and not keeps_state
    if keeps_state:
        backend = OF_THE_MODEL
    logger.info("Using attention %s - Prefix caching %s", backend, "true" if is_cached else "0")
    for rule in _rules(backend, asked, caching_asked, keeps_state):
        logger.info("%s", rule)


def _rules(backend: str, asked: str | None, caching_asked: bool, keeps_state: bool) -> Sequence[str]:
    if keeps_state:
        return [
            f"Attention {backend}: it keeps a state for each request, which no backend serves",
            "Prefix caching is off: a state cannot be shared",
        ]
    if asked is None:
        first = f"Attention {backend}: the best backend here that serves the model's layers"
    elif asked == backend:
        first = f"Attention {backend}: asked for (`--attention` or ATTENTION)"
    else:
        first = f"Attention {backend}: the best backend here, which `{asked}` stands for"
    if not caching_asked:
        return [first, "Prefix caching is off: PREFIX_CACHING says so"]
    return [first]
