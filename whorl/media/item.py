"""One picture or video, ready for a vision tower."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .families import DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaItem:
    """The patches of a picture or video. Two items with the same digest have equal patches.

    patches: [P, V] fp32. P runs over temporal patches, then merge blocks (row, column), then the rows and columns
        inside a block; V over channels, frames of the temporal patch, rows and columns of pixels.
    grid: temporal patches, rows and columns, counted in patches: their product is P.
    digest: hash of the original bytes and of everything else that influences the pixels.
    seconds: of a video, the time of each temporal patch. interval: seconds from one to the next, by which the positions
        of some models advance.
    family: of the model that it was made for, a key of `whorl.media.families.FAMILIES`.
    """

    kind: Literal["image", "video"]
    patches: NDArray[np.float32]
    grid: tuple[int, int, int]
    digest: bytes
    seconds: tuple[float, ...] = ()
    interval: float = 1.0
    family: str = DEFAULT
