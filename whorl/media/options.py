"""What a model's folder says about its pictures and videos: sizes, patches, colours, sampling of frames.

Three files may say it: `processor_config.json` (under `image_processor` and `video_processor`), which goes first as in
transformers, then `preprocessor_config.json` and `video_preprocessor_config.json`. What changes the number of tokens
has no default: a file that is overlooked must not give other limits in silence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PICTURES, _VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
_BOTH = "processor_config.json"
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_MAX_FACTOR = 1024  # of patch_size times merge_size
_FILTERS = range(6)  # Pillow's


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """min_pixels, max_pixels: areas that a picture is brought between; of a video, of all its frames together.

    resample: Pillow's number of the filter.
    """

    patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    merge_size: int = 2
    temporal_patch_size: int = 2
    rescale: float = 1 / 255
    resample: int = 3

    def __post_init__(self) -> None:
        for name in ("patch_size", "min_pixels", "max_pixels", "merge_size", "temporal_patch_size"):
            _check_count(name, getattr(self, name))
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"size: shortest_edge is {self.min_pixels}, over longest_edge, {self.max_pixels}")
        if self.factor > _MAX_FACTOR or self.factor**2 > self.max_pixels:
            raise ValueError(f"patch_size times merge_size is {self.factor}, too much for {self.max_pixels} pixels")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(isinstance(value, int | float) for value in values):
                raise ValueError(f"image_{name} is {values!r}, expected three numbers")
        if not all(value > 0 for value in self.std) or not self.rescale > 0:
            raise ValueError(f"image_std is {self.std} and rescale_factor {self.rescale}, expected more than 0")
        if self.resample not in _FILTERS:
            raise ValueError(f"resample is {self.resample!r}, expected one of Pillow's filters, 0 to 5")

    @property
    def factor(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """frames: how each one is brought to patches. fps: frames that are taken of a second.

    cap_pixels_per_frame, max_video_tokens: transformers' names: whether a frame has a limit of its own, in tokens.
    """

    frames: ImageOptions
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    def __post_init__(self) -> None:
        for name in ("min_frames", "max_frames", "max_video_tokens"):
            _check_count(name, getattr(self, name))
        if isinstance(self.fps, bool) or not isinstance(self.fps, int | float) or not self.fps > 0:
            raise ValueError(f"fps is {self.fps!r}, expected a number over 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """video: None where the model's folder says nothing of videos."""

    image: ImageOptions
    video: VideoOptions | None = None


def read_options(folder: str | Path) -> Options | None:
    """None where the model in the folder takes no pictures. ValueError names the file that cannot be followed."""
    folder = Path(folder)
    tower = _read(folder / "config.json").get("vision_config")
    if tower is None:
        return None
    both = _read(folder / _BOTH)
    pictures = _section(folder, both, "image_processor", _PICTURES)
    videos = _section(folder, both, "video_processor", _VIDEOS)
    if pictures is None:
        raise ValueError(f"{folder}: has a vision_config, and neither {_PICTURES} nor image_processor in {_BOTH}")
    image = _image_options(*pictures)
    _check_tower(folder, image, tower)
    if videos is None:
        return Options(image=image)
    video = _video_options(*videos)
    _check_tower(folder, video.frames, tower)
    return Options(image=image, video=video)


def _section(folder: Path, both: Mapping[str, Any], name: str, file: str) -> tuple[str, Mapping[str, Any]] | None:
    """Where it was found, and what is there."""
    if isinstance(both.get(name), dict):
        return f"{folder / _BOTH}: {name}", both[name]
    found = _read(folder / file)
    return (str(folder / file), found) if found else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(found).__name__}")
    return found


def _image_options(where: str, given: Mapping[str, Any]) -> ImageOptions:
    if off := [name for name in _STEPS if given.get(name) is False]:
        raise ValueError(f"{where}: {off[0]} is false, and this processor always does it")
    size = given.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{where}: size is {size!r}, expected shortest_edge and longest_edge")
    found: dict[str, Any] = {
        "patch_size": given.get("patch_size"),
        "min_pixels": given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
        "max_pixels": given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        "mean": given.get("image_mean"),
        "std": given.get("image_std"),
    }
    if missing := [name for name, value in found.items() if value is None]:
        raise ValueError(f"{where}: says nothing of {', '.join(missing)}")
    for ours in ("mean", "std"):
        found[ours] = tuple(found[ours]) if isinstance(found[ours], list) else (found[ours],) * 3
    others = {"merge_size": "merge_size", "temporal_patch_size": "temporal_patch_size"}
    others |= {"rescale": "rescale_factor", "resample": "resample"}
    found |= {ours: given[name] for ours, name in others.items() if given.get(name) is not None}
    return _made(ImageOptions, where, found)


def _video_options(where: str, given: Mapping[str, Any]) -> VideoOptions:
    if given.get("num_frames") is not None or given.get("do_sample_frames") is False:
        raise ValueError(f"{where}: frames are sampled by fps; num_frames and do_sample_frames = false are not known")
    names = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens")
    found = {name: given[name] for name in names if given.get(name) is not None}
    return _made(VideoOptions, where, {"frames": _image_options(where, given), **found})


def _made(kind: type[Any], where: str, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_tower(folder: Path, options: ImageOptions, tower: Mapping[str, Any]) -> None:
    """The tower's product has as many inputs as a patch has numbers."""
    for ours, theirs in (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
        if tower.get(theirs) is not None and tower[theirs] != getattr(options, ours):
            found = f"{ours} is {getattr(options, ours)} in the processor's file"
            raise ValueError(f"{folder}: {found}, {theirs} in vision_config {tower[theirs]}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number over 0")
