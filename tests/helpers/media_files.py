"""Pictures and videos as files, for tests: drawn, encoded, and broken in ways that matter."""

import base64
import functools
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whorl.media.options import ImageOptions, Options, VideoOptions

SIZE = {"patch_size": 16, "min_pixels": 4096, "max_pixels": 65536}
COLOURS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGE = ImageOptions(**SIZE, **COLOURS)  # type: ignore[arg-type]
VIDEO = VideoOptions(frames=ImageOptions(**SIZE | {"max_pixels": 262144}, **COLOURS))  # type: ignore[arg-type]
OPTIONS = Options(image=IMAGE, video=VIDEO)


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise and edges, in any of Pillow's modes."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width), dtype=np.uint16))
    return image if mode == "RGBA" else image.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    return encoded(drawn(width, height, seed=seed))


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def lying_png(width: int, height: int) -> bytes:
    """A few bytes whose header declares a picture of any size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


@functools.cache
def film(
    num_frames: int = 30,
    *,
    fps: int = 10,
    codec: str = "libvpx",
    container: str = "webm",
    size: tuple[int, int] = (96, 64),
    colours: str = "yuv420p",
) -> bytes:
    """Frame i is grey, of level 5 i."""
    import av

    buffer, (width, height) = io.BytesIO(), size
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, colours
        for index in range(num_frames):
            grey: NDArray[np.uint8] = np.full((height, width, 3), 5 * index, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def write_model_files(folder: Path) -> None:
    """What a folder of Qwen3-VL says about pictures, at the sizes of `OPTIONS`."""
    import json

    def file(options: ImageOptions, **more: Any) -> dict[str, Any]:
        size = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
        colours = {"image_mean": [*options.mean], "image_std": [*options.std], "rescale_factor": options.rescale}
        patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
        return {"size": size, "resample": 3, **colours, **patches, **more}

    tower = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    files = {
        "config.json": {"model_type": "qwen3_vl", "vision_config": tower},
        "preprocessor_config.json": file(IMAGE),
        "video_preprocessor_config.json": file(VIDEO.frames, fps=2, min_frames=4, max_frames=768),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
