"""Texts of images in prompts by family, as of transformers' processors, from token and layout."""

from __future__ import annotations

import re
from dataclasses import dataclass

FAKE_TOKEN = "<fake_token_around_image>"
_GLOBAL = "<global-img>"
_IDEFICS_IMAGE = f"{FAKE_TOKEN}<image>{FAKE_TOKEN}"
_BLANKS_AROUND_IMAGE = re.compile(f" *{re.escape(_IDEFICS_IMAGE)} *")
_FAKE_BEFORE_TEXT = re.compile(rf"{re.escape(FAKE_TOKEN)}(?=[^\s<])")


@dataclass(frozen=True, slots=True)
class Layout:
    """An image's tokens, and their order."""

    num_embeds: int
    # Of tiles (0: uncut), or of tokens for Pixtral's families; as columns.
    rows: int = 0
    columns: int = 0
    # Tokens of a tile.
    per_tile: int = 0


def plain(token: str, layout: Layout) -> str:
    """One image token for each row of the tower."""
    return token * layout.num_embeds


def between_fakes(token: str, layout: Layout) -> str:
    """Idefics 2: every tile between two tokens that stand for nothing."""
    tile = f"{FAKE_TOKEN}{token * layout.per_tile}{FAKE_TOKEN}"
    return tile * (layout.num_embeds // layout.per_tile)


def numbered_tiles(token: str, layout: Layout) -> str:
    """Write tiles by row and column, then the whole image (Idefics 3, SmolVLM)."""
    tile = token * layout.per_tile
    lines = [
        "".join(f"{FAKE_TOKEN}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(layout.columns)) + "\n"
        for row in range(layout.rows)
    ]
    whole = f"{FAKE_TOKEN}{_GLOBAL}{tile}{FAKE_TOKEN}"
    return "".join(lines) + f"\n{whole}" if lines else whole


def idefics(token: str, layout: Layout) -> str:
    return f"{FAKE_TOKEN}{token}{FAKE_TOKEN}"


def gemma(token: str, layout: Layout) -> str:
    return f"\n\n<start_of_image>{token * layout.num_embeds}<end_of_image>\n\n"


def gemma4(token: str, layout: Layout) -> str:
    return f"<|image>{token * layout.num_embeds}<image|>"


def aya_tiles(token: str, layout: Layout) -> str:
    """Aya Vision: tiles behind their numbers, and the whole image at the end."""
    tile = token * layout.per_tile
    numbered = "".join(f"TILE_{number}{tile}" for number in range(1, layout.num_embeds // layout.per_tile))
    return f"<|START_OF_IMG|>{numbered}TILE_GLOBAL{tile}<|END_OF_IMG|>"


def internvl(token: str, layout: Layout) -> str:
    return f"<img>{token * layout.num_embeds}</img>"


def lines_of_tokens(token: str, layout: Layout) -> str:
    """Pixtral and Mistral 3: rows of image tokens, with a token behind each."""
    row = token * layout.columns
    return f"{row}[IMG_BREAK]" * (layout.rows - 1) + f"{row}[IMG_END]"


def llama4(token: str, layout: Layout) -> str:
    tile = token * layout.per_tile
    line = "<|tile_x_separator|>".join([tile] * layout.columns) + "<|tile_y_separator|>"
    return f"<|image_start|>{line * layout.rows}<|image|>{tile}<|image_end|>"


# What the processor does to the whole text besides.


def as_it_is(text: str, bos: str) -> str:
    return text


def merge_fakes(text: str, bos: str) -> str:
    """Idefics 2: two such tokens in a row become one, and text begins with a blank behind one."""
    return _FAKE_BEFORE_TEXT.sub(f"{FAKE_TOKEN} ", text.replace(FAKE_TOKEN * 2, FAKE_TOKEN))


def idefics_prompt(text: str, bos: str) -> str:
    """Idefics: no blanks around images and at the ends; one token between images that follow one another."""
    return _BLANKS_AROUND_IMAGE.sub(_IDEFICS_IMAGE, text.strip(" ")).replace(FAKE_TOKEN * 2, FAKE_TOKEN)


def paligemma_prompt(text: str, bos: str) -> str:
    """BOS behind the last image, a newline at the end."""
    place = text.rfind("<image>")
    place = 0 if place < 0 else place + len("<image>")
    return f"{text[:place]}{bos}{text[place:]}\n"
