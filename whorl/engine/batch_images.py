"""What sequences with images and videos add to a call: their rotary positions, and the features that they insert."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .scheduler import Chunk


class Insert(NamedTuple):
    """`length` features of an image, from `offset` on, that replace embeddings of tokens in a call.

    first_token: index in the call of the first token; number: the encoder's number of the image.
    """

    first_token: int
    number: int
    offset: int
    length: int


def rotary_positions(index: np.ndarray, with_images: Sequence[tuple[int, Chunk]]) -> np.ndarray:
    """Return the rotary positions [T] of a decode call: after images they differ from the token's index.

    index: [T] index of each token in its sequence. with_images: first token in the call and chunk of each sequence that
    has images.
    """
    if not with_images:
        return index
    positions = index.copy()
    for first_token, chunk in with_images:
        assert chunk.sequence.placement is not None
        positions[first_token : first_token + chunk.length + len(chunk.draft)] += chunk.sequence.placement.delta
    return positions


def axes_of(index: np.ndarray, with_images: Sequence[tuple[int, Chunk]]) -> np.ndarray:
    """Return the rotary positions [A, T] of a prompt call with images; text has the same position on all A axes."""
    placements = [chunk.sequence.placement for _, chunk in with_images]
    axes: np.ndarray | None = None
    for (first_token, chunk), placement in zip(with_images, placements, strict=True):
        assert placement is not None
        if axes is None:
            axes = np.tile(index, (len(placement.axes), 1))
        stop = chunk.start + chunk.length
        axes[:, first_token : first_token + chunk.length] = placement.positions(chunk.start, stop)
    assert axes is not None
    return axes


def inserts_of(first_token: int, chunk: Chunk) -> Iterator[Insert]:
    """Yield the runs of image features that fall into a chunk. first_token: the chunk's first token in the call."""
    seq, start, stop = chunk.sequence, chunk.start, chunk.start + chunk.length
    assert seq.placement is not None
    for index, placed in enumerate(seq.placement.items):
        if placed.stop <= start or placed.start >= stop:
            continue
        for frame, span in enumerate(placed.spans):
            first, end = max(span.start, start), min(span.stop, stop)
            if first < end:
                offset = frame * len(span) + first - span.start
                yield Insert(first_token + first - start, seq.features[index], offset, end - first)
