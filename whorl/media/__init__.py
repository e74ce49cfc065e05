"""Pictures and videos, from bytes that a stranger sent to what a vision tower takes."""

from .item import MediaItem

__all__ = ["MediaItem"]
