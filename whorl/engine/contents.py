"""Contents identify what placeholder tokens of a prompt stand for, such as images, to the prefix cache."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

_LEAST_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True)
class Content:
    """What a span of placeholder tokens stands for, such as an image: equal token ids do not mean equal content.

    digest: a hash of all that determines the span's keys and values besides the token ids, at least 16 bytes.
    Raises ValueError for an empty span or a shorter digest.
    """

    span: range
    digest: bytes

    def __post_init__(self) -> None:
        if self.span.step != 1 or not self.span or self.span.start < 0:
            raise ValueError(f"Content: span is {self.span}, expected a range of one or more consecutive tokens")
        if not isinstance(self.digest, bytes) or len(self.digest) < _LEAST_DIGEST:
            raise ValueError(
                f"Content: digest is {self.digest!r}, expected {_LEAST_DIGEST} bytes or more, such as a SHA-256: "
                f"contents with the same digest share the prefix cache"
            )


def sorted_contents(contents: Iterable[Content], length: int) -> tuple[Content, ...]:
    """Return the contents in the order of a prompt of `length` tokens; ValueError if spans overlap or pass its end."""
    ordered = tuple(sorted(contents, key=lambda content: content.span.start))
    for content, after in itertools.pairwise((*ordered, Content(range(length, length + 1), bytes(_LEAST_DIGEST)))):
        if content.span.stop > after.span.start:
            raise ValueError(f"contents: {content.span} of a prompt of {length} tokens overlaps {after.span}")
    return ordered
