"""Which objects the garbage collector walks through, and what freed memory goes back to the system."""

import contextlib
import ctypes
import gc


def keep_objects() -> None:
    """Exempt all objects that exist from later garbage collections; for a process that serves until its end.

    A full collection walks through every object of torch, the model and its graphs, hundreds of thousands, and no
    request goes on meanwhile. Objects are still freed when nothing refers to them, but cycles of these stay.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Give freed memory back to the system, where the C library can; takes some milliseconds.

    By itself it gives back only the end of the heap. Bodies that arrive together leave gaps between each other's blocks
    that fit nothing large, so that the texts parsed from them would need as much memory once more.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
