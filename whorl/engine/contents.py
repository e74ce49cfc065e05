"""What stands behind placeholder tokens of a prompt, as far as the prefix cache must know it."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

_LEAST_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True)
class Content:
    """What stands behind a span of placeholder tokens, such as a picture: equal ids are not equal content.

    digest: of all that decides the span's keys and values beside the token ids, at least 16 bytes.
    """

    span: range
    digest: bytes

    def __post_init__(self) -> None:
        if self.span.step != 1 or not self.span or self.span.start < 0:
            raise ValueError(f"Content: the span is {self.span}, expected one or more tokens side by side")
        if not isinstance(self.digest, bytes) or len(self.digest) < _LEAST_DIGEST:
            raise ValueError(
                f"Content: the digest is {self.digest!r}, expected {_LEAST_DIGEST} bytes or more, such as a SHA-256: "
                f"contents with the same digest share the prefix cache"
            )


def sorted_contents(contents: Iterable[Content], length: int) -> tuple[Content, ...]:
    """In the order of a prompt of `length` tokens; spans past its end and spans that overlap are refused."""
    found = tuple(sorted(contents, key=lambda content: content.span.start))
    for content, after in itertools.pairwise((*found, Content(range(length, length + 1), bytes(_LEAST_DIGEST)))):
        if content.span.stop > after.span.start:
            raise ValueError(f"contents: {content.span} of a prompt of {length} tokens reaches into {after.span}")
    return found
