"""What the model servers of upstream TGI make of a prompt with images: which models, and which texts."""

from __future__ import annotations

from collections.abc import Sequence

from wire.images.expansions import FAKE_TOKEN

TYPES = frozenset(
    {
        "gemma3", "idefics", "idefics2", "idefics3", "llama4", "llava_next", "mllama", "paligemma", "qwen2_5_vl",
        "qwen2_vl",
    }
)  # fmt: skip
"""Model types whose images they read."""

FILES = "files"
"""What they are sent, instead of arrays of the model's type."""

_FORMATS = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"II", "image/tiff"),
    (b"MM", "image/tiff"),
)


def prompt_text(name: str, pieces: Sequence[str], expansions: Sequence[str]) -> str:
    """The text that is cut into tokens. pieces: the texts around the images, one more than there are expansions.

    For PaliGemma every text that is sent, which an empty one is not, gets BOS and a newline.
    """
    texts = [f"<bos>{piece}\n" if piece else "" for piece in pieces] if name == "paligemma" else pieces
    parts = [texts[0]]
    for expansion, text in zip(expansions, texts[1:], strict=True):
        parts += [expansion, text]
    whole = "".join(parts)
    return whole.replace(FAKE_TOKEN * 2, FAKE_TOKEN) if name == "idefics2" else whole


def mimetype(data: bytes) -> str:
    """Of a file, by its first bytes; what TGI's router says of one that it does not know."""
    return next((name for begin, name in _FORMATS if data.startswith(begin)), "application/octet-stream")
