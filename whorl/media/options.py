"""Reads the preprocessing options in a model's folder: sizes, patches, colours, sampling of frames.

They are in `processor_config.json` (under `image_processor` and `video_processor`), which has precedence as in
transformers, or in `preprocessor_config.json` and `video_preprocessor_config.json`. Options that change the number of
tokens have no default, so that a missing file cannot silently change the limits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .families import DEFAULT, FAMILIES, Family, Sampling

_PICTURES, _VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
_BOTH = "processor_config.json"
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_MAX_FACTOR = 1024  # of patch_size times merge_size
_FILTERS = range(6)  # Pillow's


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Preprocessing of pictures, or of the frames of a video. Raises ValueError for invalid values.

    patch_size: side of a patch in pixels. merge_size: side, in patches, of the square that becomes one token.
    temporal_patch_size: frames of a patch. min_pixels, max_pixels: a picture is resized so that its area is between
    these; for a video, the area of all frames together. rescale: what levels 0 to 255 are multiplied with; mean, std:
    of each channel, after that. resample: Pillow's number of the filter. frames: the limits on the area are for so many
    equal frames.
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
    frames: int = 1

    def __post_init__(self) -> None:
        for name in ("patch_size", "min_pixels", "max_pixels", "merge_size", "temporal_patch_size", "frames"):
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
        """The side of the square of pixels that becomes one token."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """Preprocessing of videos. Raises ValueError for invalid values.

    frames: preprocessing of each frame. fps: how many frames are sampled from a second. cap_pixels_per_frame,
    max_video_tokens: transformers' names: whether each frame has its own limit, and that limit in tokens.
    sampling, area: as in `whorl.media.families.Family`. max_duration: seconds, of the sampling by seconds.
    """

    frames: ImageOptions
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768
    sampling: Sampling = "ends"
    area: Literal["video", "frame"] = "video"
    max_duration: int = 300

    def __post_init__(self) -> None:
        for name in ("min_frames", "max_frames", "max_video_tokens", "max_duration"):
            _check_count(name, getattr(self, name))
        if isinstance(self.fps, bool) or not isinstance(self.fps, int | float) or not self.fps > 0:
            raise ValueError(f"fps is {self.fps!r}, expected a number over 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Preprocessing of a model's media. video: None: the model takes no videos. family: a key of `FAMILIES`."""

    image: ImageOptions
    video: VideoOptions | None = None
    family: str = DEFAULT


def read_options(folder: str | Path) -> Options | None:
    """Read the options of the model in a folder; None if it takes no pictures.

    Raises ValueError, which names the file that is missing or invalid.
    """
    folder = Path(folder)
    config = _read(folder / "config.json")
    tower, kind = config.get("vision_config"), str(config.get("model_type"))
    if tower is None:
        return None
    both = _read(folder / _BOTH)
    pictures = _section(folder, both, "image_processor", _PICTURES)
    videos = _section(folder, both, "video_processor", _VIDEOS)
    if pictures is None:
        raise ValueError(f"{folder}: has a vision_config, and neither {_PICTURES} nor image_processor in {_BOTH}")
    name = kind if kind in FAMILIES else DEFAULT
    image = _image_options(*pictures, frames=FAMILIES[name].picture_frames)
    _check_tower(folder, image, tower)
    if videos is None and FAMILIES[name].area == "frame":
        videos = pictures  # as transformers does for models from before it had video_preprocessor_config.json
    if videos is None:
        return Options(image=image, family=name)
    video = _video_options(*videos, FAMILIES[name])
    _check_tower(folder, video.frames, tower)
    return Options(image=image, video=video, family=name)


def _section(folder: Path, both: Mapping[str, Any], name: str, file: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the section's place, for messages, and its content; None if there is none."""
    if isinstance(both.get(name), dict):
        return f"{folder / _BOTH}: {name}", both[name]
    content = _read(folder / file)
    return (str(folder / file), content) if content else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(content).__name__}")
    return content


def _image_options(where: str, section: Mapping[str, Any], *, frames: int = 1) -> ImageOptions:
    """Build the options from a section of the model's files, with transformers' names. where: its place, for errors.
    frames: as in `ImageOptions`."""
    if off := [name for name in _STEPS if section.get(name) is False]:
        raise ValueError(f"{where}: {off[0]} is false, and this processor always does it")
    size = section.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{where}: size is {size!r}, expected shortest_edge and longest_edge")
    values: dict[str, Any] = {
        "patch_size": section.get("patch_size"),
        "min_pixels": section.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
        "max_pixels": section.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        "mean": section.get("image_mean"),
        "std": section.get("image_std"),
        "frames": frames,
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"{where}: {', '.join(missing)} is missing")
    for ours in ("mean", "std"):
        values[ours] = tuple(values[ours]) if isinstance(values[ours], list) else (values[ours],) * 3
    optional = {"merge_size": "merge_size", "temporal_patch_size": "temporal_patch_size"}
    optional |= {"rescale": "rescale_factor", "resample": "resample"}
    values |= {ours: section[name] for ours, name in optional.items() if section.get(name) is not None}
    return _build(ImageOptions, where, values)


def _video_options(where: str, section: Mapping[str, Any], family: Family) -> VideoOptions:
    if section.get("num_frames") is not None or section.get("do_sample_frames") is False:
        raise ValueError(
            f"{where}: frames are sampled by fps; num_frames and do_sample_frames = false are not supported"
        )
    own = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens", "sampling", "area")
    values = {name: getattr(family, name) for name in own}
    values |= {name: section[name] for name in (*own[:-2], "max_duration") if section.get(name) is not None}
    return _build(VideoOptions, where, {"frames": _image_options(where, section), **values})


def _build(kind: type[Any], where: str, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_tower(folder: Path, options: ImageOptions, tower: Mapping[str, Any]) -> None:
    """Raise ValueError unless the patches have the size that the vision tower's first layer takes."""
    for ours, theirs in (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
        if tower.get(theirs) is not None and tower[theirs] != getattr(options, ours):
            actual = f"{ours} is {getattr(options, ours)} in the processor's file"
            raise ValueError(f"{folder}: {actual}, expected {tower[theirs]}, which is {theirs} in vision_config")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number over 0")
