"""Pictures and videos, from bytes that a stranger sent to what a vision tower takes.

`sources` has the bytes (of data: URIs, files, allowed hosts), `processor` makes `MediaItem`s of them, decoding in a
process of its own (`decoder`, `child`), and `places` makes room for them in the prompt. No torch here.
"""

from .errors import MediaError
from .item import MediaItem
from .limits import Limits
from .places import Place, expand
from .processor import Processor

__all__ = ["Limits", "MediaError", "MediaItem", "Place", "Processor", "expand"]
