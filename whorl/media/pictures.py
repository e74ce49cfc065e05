"""Decodes pictures to pixels with Pillow. Runs only in the child process that `decoder` starts.

Transparent pixels are composited on white, as transformers' Pillow processor does. Two things differ from transformers:
a picture is rotated by its EXIF orientation before its size is used, which transformers leaves to the code that loads
pictures; and 16-bit grey is reduced to 8 bits by taking the high byte, as Pillow does for 16-bit colour. Pillow's own
conversion of grey clips at 255, which makes almost every pixel white.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from .errors import DecodeError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # of a GIF, as of others that move, the first picture


def open_picture(data: bytes, max_pixels: int) -> Image.Image:
    """Decode the first frame, after checking the size that the header declares; raises what `declared` does."""
    image = declared(data, max_pixels)
    image.load()
    return image


def declared(data: bytes, max_pixels: int) -> Image.Image:
    """Read a picture's header.

    Raises DecodeError when the format is not one of `FORMATS` or the picture has more than max_pixels pixels.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit below is stricter, and Pillow's would print warnings
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise DecodeError("format", detail=str(error)) from error
    if image.width * image.height > max_pixels:
        raise DecodeError("pixels", image.width, image.height, max_pixels)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: upright, opaque, 8 bits per channel."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = _from_16_bits(image)
    upright = ImageOps.exif_transpose(image)
    if "A" not in upright.getbands() and upright.info.get("transparency") is None:
        return upright.convert("RGB")
    transparent = upright.convert("RGBA")
    white = Image.new("RGBA", transparent.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, transparent).convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Return a 16-bit grey picture with 8 bits, and an alpha channel if one level is marked as transparent."""
    values = np.array(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent_level = image.info.get("transparency")
    converted = grey
    if transparent_level is not None:
        alpha = Image.fromarray(np.where(values == transparent_level, 0, 255).astype(np.uint8))
        converted = Image.merge("LA", (grey, alpha))
    converted.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return converted


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> NDArray[np.uint8]:
    """Resize a picture; returns [H, W, 3] uint8. size: height and width; resample: Pillow's number of the filter."""
    return np.asarray(image.resize((size[1], size[0]), resample=Image.Resampling(resample)))
