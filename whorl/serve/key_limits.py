"""API keys from a file, and the limits of each: concurrent requests, requests and tokens per minute."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .api_error import ApiError

_LIMITS = ("max_running", "requests_per_minute", "tokens_per_minute")
_MINUTE = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """An API key and its limits; a limit that is None does not apply.

    key: the secret. name: what logs call the key. max_running: requests in progress. tokens_per_minute: tokens of
    prompts and answers; a request that exceeds the limit is finished, and the next one is refused.
    """

    key: str
    name: str
    max_running: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def read_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """Read a file with one key on each line; # begins a comment.

    A line is `KEY [NAME] [max_running=N] [requests_per_minute=N] [tokens_per_minute=N]`. Raises ValueError, which names
    the line but does not show its key.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"serve: --api-key-file {path}: cannot be read: {error}") from error
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not (words := line.partition(" #")[0].split()) or words[0].startswith("#"):
            continue
        try:
            api_key = _key(words, len(keys))
            if api_key.key in keys:
                raise ValueError("the key is in an earlier line, too")
        except ValueError as error:
            raise ValueError(f"serve: --api-key-file {path}, line {number}: {error}") from None
        keys[api_key.key] = api_key
    if not keys:
        raise ValueError(f"serve: --api-key-file {path}: there is no key in it")
    return tuple(keys.values())


def _key(words: Sequence[str], number: int) -> ApiKey:
    key, *fields = words
    names = [word for word in fields if "=" not in word]
    if len(names) > 1:
        raise ValueError(f"a key has one name, here are {len(names)}: {' '.join(names)}")
    limits = dict(_limit(word) for word in fields if "=" in word)
    return ApiKey(key=key, name=names[0] if names else f"#{number + 1}", **limits)


def _limit(word: str) -> tuple[str, int]:
    name, _, value = word.partition("=")
    if name not in _LIMITS:
        raise ValueError(f"{name!r} is not known; a key may have {', '.join(_LIMITS)}")
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ValueError(f"{name} is {value!r}, expected a whole number from 1")
    return name, int(value)


class KeyUse:
    """Enforces the limits of one key. Used on the event loop alone, so it needs no lock."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self._num_running = key, 0
        self._requests = _Bucket(key.requests_per_minute, clock)
        self._tokens = _Bucket(key.tokens_per_minute, clock)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Surround the work for one request; raise ApiError 429 when a limit of the key is reached."""
        most = self.key.max_running
        if most is not None and self._num_running >= most:
            raise _refused(f"{self._num_running} requests of this key are in progress; up to {most} may be", 1.0)
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if (wait := bucket.wait(1.0 if unit == "requests" else 0.0)) > 0:
                raise _refused(f"this key has used up its {bucket.per_minute} {unit} a minute", wait)
        self._requests.take(1)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Count the tokens of a finished request."""
        self._tokens.take(num_tokens)


class _Bucket:
    """A token bucket: it holds one minute's worth, fills up evenly, and may be overdrawn."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._left, self._at = float(per_minute or 0), clock()

    def wait(self, count: float) -> float:
        """Return the seconds until `count` are available; for 0, until the bucket is no longer overdrawn."""
        if self.per_minute is None:
            return 0.0
        self._fill()
        return max(0.0, (count - self._left) * _MINUTE / self.per_minute)

    def take(self, count: float) -> None:
        if self.per_minute is not None:
            self._fill()
            self._left -= count

    def _fill(self) -> None:
        assert self.per_minute is not None
        now = self._clock()
        self._left = min(self.per_minute, self._left + (now - self._at) * self.per_minute / _MINUTE)
        self._at = now


def _refused(message: str, wait: float) -> ApiError:
    headers = {"Retry-After": str(math.ceil(wait))}
    return ApiError(429, f"{message}. Try again later.", code="rate_limit_exceeded", headers=headers)
