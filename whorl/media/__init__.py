"""Reads pictures and videos that clients send, up to the patches that a vision tower takes.

`sources` reads the bytes (from data: URIs, files and allowed hosts), `processor` turns them into `MediaItem`s, decoding
in a separate process (`decoder`, `child`), and `places` reserves their tokens in the prompt. Does not import torch.
"""

from .errors import MediaError
from .item import MediaItem
from .limits import Limits
from .places import Placeholder, expand
from .processor import Processor

__all__ = ["Limits", "MediaError", "MediaItem", "Placeholder", "Processor", "expand"]
