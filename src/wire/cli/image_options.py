"""ImageOptions: options of the launcher and of the router for images in requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.cli.options import option

_IMAGES = "Images"


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options for models that read images; they change nothing for others."""

    max_images: int = option(8, panel=_IMAGES, help="Most images of one request; 0 refuses them all.")
    max_image_fetch_size: int = option(
        10 << 20, panel=_IMAGES, unit="bytes", minimum=1, help="Largest file of an image, fetched or in a data URL."
    )
    max_image_pixels: int = option(
        50_000_000, panel=_IMAGES, minimum=1, help="Most pixels of an image; a request may have twice as many in all."
    )
    max_image_memory_mib: int = option(
        2048, panel=_IMAGES, minimum=1,
        help="Memory of the router for prepared images; requests beyond it are refused with 429.",
    )  # fmt: skip
    image_cache_mib: int = option(
        256, panel=_IMAGES, help="Part of that memory in which the last images are kept for other requests."
    )
    image_fetch: Literal["off", "public", "all"] = option(
        "public", panel=_IMAGES,
        help="Images at http and https URLs: `off` (data URLs only), `public` (from public addresses), `all` (also "
        "from the network of the server).",
    )  # fmt: skip
    image_fetch_seconds: float = option(
        10.0, panel=_IMAGES, minimum=0.1, maximum=3600, help="Seconds in which an image must be fetched."
    )
    image_hosts: tuple[str, ...] = option(
        (), panel=_IMAGES,
        help="HOST or HOST:PORT from which images are fetched, public or not; repeatable. Default: any public one.",
    )  # fmt: skip


IMAGE_FLAGS = (
    "max_images", "max_image_fetch_size", "max_image_pixels", "max_image_memory_mib", "image_cache_mib", "image_fetch",
    "image_fetch_seconds", "image_hosts",
)  # fmt: skip
"""Those that the launcher hands on to the router."""
