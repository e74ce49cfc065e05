"""How families of models differ: what stands in a prompt for a picture or video, and how a video is sampled.

Everything is as transformers' processor of the family does it, but for `cap_pixels_per_frame`, see `Family`.
"""

from dataclasses import dataclass
from typing import Literal

Sampling = Literal["ends", "steps", "seconds", "dynamic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """image, video: the placeholders that the chat template writes, one for each picture or video.

    frame: what replaces a video's placeholder, for each temporal patch: {pads} are its placeholder tokens, {seconds}
    its time. frame_pad: the token of which {pads} are made. time: of a temporal patch of two frames, that of the first
    or the mean of both.
    sampling: which frames of a video are taken, see `whorl.media.sizes`. fps, min_frames, max_frames: what the sampling
    uses if the model's files do not say. area: whether the limits on pixels are for all frames of a video together or
    for each; those of a picture are for `picture_frames` equal frames. cap_pixels_per_frame: the default of this
    option; Qwen2-VL's is what Qwen's own code does, and transformers from 5.22 on.
    """

    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"
    frame: str = "<{seconds:.1f} seconds><|vision_start|>{pads}<|vision_end|>"
    frame_pad: str = "<|video_pad|>"
    time: Literal["first", "mean"] = "mean"
    sampling: Sampling = "ends"
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    area: Literal["video", "frame"] = "video"
    picture_frames: int = 1
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    @property
    def pads(self) -> dict[str, str]:
        """The placeholder of each kind of media."""
        return {"image": self.image, "video": self.video}

    def frame_text(self, num_tokens: int, seconds: float) -> str:
        """Return the text of a temporal patch of a video."""
        return self.frame.format(pads=self.frame_pad * num_tokens, seconds=seconds, whole=int(seconds))


_QWEN2_VL = Family(frame="{pads}", sampling="steps", area="frame", cap_pixels_per_frame=True, max_video_tokens=128000)
_GLM = Family(
    image="<|image|>",
    video="<|video|>",
    frame="<|begin_of_image|>{pads}<|end_of_image|>{whole}",
    frame_pad="<|image|>",
    time="first",
    sampling="seconds",
    picture_frames=2,
)
_GLM_46 = Family(
    image=_GLM.image,
    video=_GLM.video,
    frame="<|begin_of_image|>{pads}<|end_of_image|>{seconds:.1f} seconds",
    frame_pad=_GLM.frame_pad,
    time="first",
    sampling="dynamic",
    picture_frames=2,
)
# By the model_type of config.json.
FAMILIES = {
    "qwen3_vl": Family(),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM_46,
}
DEFAULT = "qwen3_vl"  # of a model_type that is not here: its successors and its forms with experts
