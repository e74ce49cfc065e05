"""Pictures to pixels, by Pillow. Runs in the child process that `decoder` starts, and nowhere else.

Transparency is laid on white, as transformers' Pillow processor does. Two things are ours: a picture is turned as its
EXIF orientation says before anything looks at its size, which transformers leaves to the code that loads pictures, and
16-bit grey is brought to 8 bits by its high byte, as Pillow does with 16-bit colour. Pillow's own conversion cuts it at
255, which makes it white.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from .errors import DecodeError

FORMATS = ("PNG", "JPEG", "WEBP")


def open_picture(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame, decoded; what the header declares is looked at before."""
    Image.MAX_IMAGE_PIXELS = None  # the limit below is stricter, and gives no warnings
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise DecodeError("format", detail=str(error)) from error
    if image.width * image.height > max_pixels:
        raise DecodeError("pixels", image.width, image.height, max_pixels)
    image.load()
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright, opaque, 8 bits a channel."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = _from_16_bits(image)
    turned = ImageOps.exif_transpose(image)
    if "A" not in turned.getbands() and turned.info.get("transparency") is None:
        return turned.convert("RGB")
    clear = turned.convert("RGBA")
    white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, clear).convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    values = np.array(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    found = grey
    if clear is not None:
        found = Image.merge("LA", (grey, Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))))
    found.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return found


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> NDArray[np.uint8]:
    """[H, W, 3]. size: height and width."""
    return np.asarray(image.resize((size[1], size[0]), resample=Image.Resampling(resample)))
