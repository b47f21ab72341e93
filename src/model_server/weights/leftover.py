"""What a load left unread: useless, of absent layers, or an error, such as a missed scale."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence

from model_server.errors import StartupError

logger = logging.getLogger(__name__)

OF_ANY_FAMILY = (
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",  # computed from the config
    r"(^|\.)position_ids$",
    # Scales of a KV cache in float8, where the cache has another type.
    r"\.(attn\.)?(q|k|v|kv|prob)_scale$",
    r"\.(q|k|v|qkv|kv)_proj\.([qkv]_scale|output_scale)$",
    r"^gptq_(bits|groupsize|sym)$",  # read with the config
)
"""Patterns of tensors that files of many families hold, and that none needs."""

# Of layers behind the model's own that draft: they mix the embedding of the next token with the model's states.
_DRAFTS = re.compile(r"\.(eh_proj|enorm|hnorm)\.")
_DIGITS = re.compile(r"(\d+)")


def check_leftover(
    unread: Iterable[str],
    model_type: str,
    layer_beyond: Callable[[str], int | None],
    *,
    known: Sequence[str] = (),
    warns: bool = True,
) -> None:
    """Refuse unread tensors that are not known.

    Args:
        layer_beyond: A tensor's layer, if config.json lacks it; these are warned of, since models are cut so.
        known: Patterns that the family does not need.
    """
    patterns = re.compile("|".join((*OF_ANY_FAMILY, *known)))
    beyond: dict[int, list[str]] = {}
    others = []
    for name in unread:
        if patterns.search(name) is not None:
            continue
        index = layer_beyond(name)
        if index is None:
            others.append(name)
        else:
            beyond.setdefault(index, []).append(name)
    if others:
        first = min(others, key=natural_order)
        more = f", nor {len(others) - 1} others" if len(others) > 1 else ""
        raise StartupError(
            f"weight {first} is in the files, but nothing of {model_type} as config.json describes it reads it{more}: "
            "give the files that belong to this config.json, or remove from them what is not the model's"
        )
    without = sorted(index for index, names in beyond.items() if not any(map(_DRAFTS.search, names)))
    if without and warns:
        what = "layer is" if len(without) == 1 else "layers are"
        logger.warning(
            "The files hold more layers than config.json has: %d %s left out, from number %d on",
            len(without),
            what,
            without[0],
        )


def layer_of(name: str, layers: Sequence[str]) -> int | None:
    """Return a tensor's layer, if its name begins as `layers`."""
    for prefix in layers:
        index = name.removeprefix(prefix + ".").partition(".")[0]
        if name.startswith(prefix + ".") and index.isdecimal():
            return int(index)
    return None


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key by numbers in names."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]
