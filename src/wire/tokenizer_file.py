"""Where a model's tokenizer.json is, for router and shard: its folder, or a converted copy in the hub cache, named by
its sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path

NAME = "tokenizer.json"

# What a tokenizer.json can be made of; each group must be whole.
_SOURCES = (
    ("vocab.json", "merges.txt"),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tiktoken.model",),
    ("tekken.json",),
    ("vocab.txt",),
)
# Vocabularies with gaps are made for embeddings that are wider: by a half at most, of those known.
_MOST_IDS_PER_TOKEN = 2
_FEW_IDS = 2**20
_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def find(folder: Path) -> Path | None:
    """Return the model's tokenizer.json, if there yet."""
    own = folder / NAME
    if own.exists():
        return own
    if not sources(_names(folder)):
        return None
    copy = converted_copy(folder)
    return copy if copy.is_file() else None


def num_ids(ids: Collection[int], error: type[Exception]) -> int:
    """Return the ids' bound, if not far above the tokens."""
    largest = max(ids, default=-1)
    if largest >= max(_MOST_IDS_PER_TOKEN * len(ids), _FEW_IDS):
        raise error(f"the tokenizer has a token with the id {largest}, but only {len(ids)} tokens")
    return largest + 1


def sources(names: Iterable[str]) -> tuple[str, ...]:
    """Return files that a tokenizer.json could be made of."""
    present = set(names)
    return next((group for group in _SOURCES if present.issuperset(group)), ())


def converted_copy(folder: Path) -> Path:
    """The place of the copy for a folder that cannot be written."""
    # Imported here: wanted only for models without a tokenizer.json.
    from huggingface_hub import constants

    digest = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape"))
    for name in (*sources(_names(folder)), *_SETTINGS):
        try:
            facts = (folder / name).stat()
        except OSError:
            continue
        digest.update(f"\0{name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return Path(constants.HF_HUB_CACHE) / ".tercet" / digest.hexdigest()[:32] / NAME


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []
