"""Errors of the tokenizers package."""

import contextlib
from collections.abc import Iterator


class DecodeError(RuntimeError):
    """Token ids that the model's tokenizer cannot decode: its file is at fault, and not the request."""


@contextlib.contextmanager
def errors_as(kind: type[Exception], message: str) -> Iterator[None]:
    """Turn what the tokenizers package raises into an error of type `kind`: plain Exceptions, as for a word that has no
    token, and panics, as of a regular expression that gives up on a text of millions of spaces.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # no Exception, and cannot be imported from any module
        if isinstance(error, MemoryError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise kind(f"{message}: {error}") from error
