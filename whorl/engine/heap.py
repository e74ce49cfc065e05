"""Which objects the garbage collector walks through."""

import gc


def keep_objects() -> None:
    """Exempt all objects that exist from later garbage collections; for a process that serves until its end.

    A full collection walks through every object of torch, the model and its graphs, hundreds of thousands, and no
    request goes on meanwhile. Objects are still freed when nothing refers to them, but cycles of these stay.
    """
    gc.collect()
    gc.freeze()
