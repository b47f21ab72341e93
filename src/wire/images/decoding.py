"""From files to pixels; untrusted, so sizes are known before decoding."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from wire.images.prepared import Detail

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF")
_LOW_DETAIL_SIDE = 512
# Each goes over all pixels, in some ten bytes; encoders write about ten.
_MOST_SCANS = 100
_SCAN = b"\xff\xda"


class ImageError(ValueError):
    """An image that cannot be used; the text says why, for the client."""


def decode(data: bytes, *, max_pixels: int, detail: Detail = "auto", turns: bool = True) -> Image.Image:
    """Return the first frame as RGB, turned by EXIF if it `turns`; detail `low`: at most 512 pixels a side.

    Raises:
        ImageError, MemoryError: It cannot be decoded.
    """
    Image.MAX_IMAGE_PIXELS = None  # `max_pixels` is the limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged metadata, which no client sees
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as file:
                check_pixels(file.width, file.height, max_pixels)
                # In other formats Pillow reads JPEG by libtiff, which has the same limit.
                if file.format in ("JPEG", "MPO") and data.count(_SCAN) > _MOST_SCANS:
                    raise ImageError(f"it has more than {_MOST_SCANS} scans")
                file.load()
                return _reduced(_rgb(ImageOps.exif_transpose(file) if turns else file), detail)
        except UnidentifiedImageError:
            raise ImageError("it is none of png, jpeg, gif, webp and tiff") from None
        except ImageError:
            raise
        except MemoryError:
            raise
        except Exception:  # whatever a decoder raises: OSError, SyntaxError, ValueError, struct.error ...
            raise ImageError("the file is damaged or incomplete") from None


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raises ImageError."""
    if width < 1 or height < 1:
        raise ImageError("it has no pixels")
    if width * height > max_pixels:
        raise ImageError(f"it has {width}x{height} pixels, the limit is {max_pixels} in all")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # of 16 bits a pixel Pillow would cut off the values above 255
        values = np.asarray(image.convert("I")) >> 8
        image = Image.fromarray(values.astype(np.uint8))
    return image.convert("RGB")


def _reduced(image: Image.Image, detail: Detail) -> Image.Image:
    longest = max(image.size)
    if detail != "low" or longest <= _LOW_DETAIL_SIDE:
        return image
    width, height = (max(1, round(side * _LOW_DETAIL_SIDE / longest)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)
