"""The requests of a load and their arrival times, all drawn from the seed before the clock starts.

Lengths and times are the same at every point of a sweep. Tokens differ, else a server with a prefix cache would have
the prompts of the previous point.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int32]  # indices into a vocabulary of token ids or words
_INPUTS, _OUTPUTS, _TOKENS, _TIMES, _CHOICE, _PREFIXES, _BLOCKS = range(7)  # independent streams of random numbers
_BLOCK_TOKENS = 512  # tokens of a block in a trace's hash_ids
_MOST = 20000  # most requests to draw when only --seconds is given
DEFAULT_REQUESTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """A distribution of token counts: uniform in low..high, or lognormal (median, sigma) clipped to low..high."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @staticmethod
    def parse(text: str, option: str) -> "Lengths":
        """Return the distribution that an option gives as text; raises ValueError for anything else."""
        kind, _, numbers = text.rpartition(":")
        try:
            if kind == "lognormal":
                median, sigma, *most = numbers.split(",")
                (high,) = [int(number) for number in most] or [2**31 - 1]
                lengths = Lengths(low=1, high=high, median=float(median), sigma=float(sigma))
            else:
                lengths = Lengths(low=int(kind or numbers), high=int(numbers))
        except ValueError:
            lengths = Lengths(low=0, high=0)
        is_shaped = lengths.median is None or (lengths.median >= 1 and 0 <= lengths.sigma < math.inf)
        if not 1 <= lengths.low <= lengths.high or not is_shaped:
            raise ValueError(
                f"{option} is {text}, expected tokens from 1: 512, 512:1536, or lognormal:512,0.8 (median, sigma) "
                "with an optional maximum as third number"
            )
        return lengths

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Return `count` random lengths."""
        if self.median is None:
            return rng.integers(self.low, self.high, count, endpoint=True)
        drawn = np.rint(rng.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How requests arrive: at a rate per second, with a number in flight, or at the times of a trace."""

    kind: Literal["rate", "concurrency", "trace"]
    value: float = math.inf

    @property
    def concurrency(self) -> int | None:
        return int(self.value) if self.kind == "concurrency" else None

    def __str__(self) -> str:
        if self.kind == "trace":
            return "times of the trace"
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:g} requests/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to send. at: seconds after the start; None: when another ends. index: negative in the warm-up."""

    index: int
    prompt: Places
    num_output: int
    at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a trace. at: when it is sent, in seconds; blocks: ids of the blocks of its prompt (hash_ids)."""

    num_input: int
    num_output: int
    at: float | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What to draw. count: number of requests; None: as many as fit `seconds`. trace: fixed lengths and times."""

    input: Lengths
    output: Lengths
    count: int | None = None
    seconds: float | None = None
    shared_prefix: int = 0
    num_prefixes: int = 1
    seed: int = 0
    trace: tuple[Line, ...] = ()

    def requests(self, load: Load, vocab_size: int, *, point: int = 0) -> list[Request]:
        """Return the requests in the order of sending.

        vocab_size: prompts are made of numbers below it. point: the point of a sweep, on which only the tokens depend.
        """
        times = self._times(load)
        count = self._count(load) if times is None else len(times)
        lines = self.trace[:count] or self._lines(count)
        chosen = self._rng(_CHOICE).integers(self.num_prefixes, size=count)
        tokens = _Tokens(self, vocab_size, point)
        return [
            Request(
                index=index,
                prompt=tokens.prompt(line, int(prefix)),
                num_output=line.num_output,
                at=None if times is None else times[index],
            )
            for index, (line, prefix) in enumerate(zip(lines, chosen, strict=True))
        ]

    def warmup(self, count: int, vocab_size: int, *, point: int = 0) -> list[Request]:
        """Return warm-up requests of the same lengths, whose prompts do not occur in the load."""
        if count == 0:
            return []
        count = min(count, len(self.trace) or count)
        other = replace(self, count=count, seconds=None)
        requests = other.requests(Load(kind="concurrency", value=1), vocab_size, point=-1 - point)
        return [replace(request, index=-1 - request.index) for request in requests]

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its output; practically unbounded for lognormal lengths without a maximum."""
        if self.trace:
            return max(line.num_input + line.num_output for line in self.trace)
        return self.shared_prefix + self.input.high + self.output.high

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])

    def _lines(self, count: int) -> list[Line]:
        # Separate streams, so that the first lengths are the same however many are drawn.
        inputs, outputs = self.input.draw(self._rng(_INPUTS), count), self.output.draw(self._rng(_OUTPUTS), count)
        return [Line(num_input=int(i), num_output=int(o)) for i, o in zip(inputs, outputs, strict=True)]

    def _count(self, load: Load) -> int:
        """Return how many requests to draw: enough for `seconds`, where that decides how many are sent."""
        if self.count is not None:
            return self.count
        if self.trace:
            return len(self.trace)
        if self.seconds is None:
            return DEFAULT_REQUESTS
        if load.kind == "concurrency":
            # Enough when a request takes a quarter of a second or more.
            return min(_MOST, math.ceil(self.seconds * 4) * int(load.value))
        mean = self.seconds * load.value
        if mean > _MOST:
            raise ValueError(f"{load} for {self.seconds:g} seconds is more than {_MOST} requests; give --requests N")
        return math.ceil(mean + 8 * math.sqrt(mean) + 8)  # more than will arrive, by eight standard deviations

    def _times(self, load: Load) -> list[float] | None:
        """Return when to send each request; None where each follows the end of another."""
        if load.kind == "concurrency":
            return None
        if load.kind == "trace":
            times = [line.at or 0.0 for line in self.trace]
            return [at for at in times if self.seconds is None or at < self.seconds][: self.count]
        count = self._count(load)
        at = np.cumsum(self._rng(_TIMES).exponential(size=count)) / load.value
        return [float(time) for time in at if self.seconds is None or time < self.seconds]


class _Tokens:
    """Draws the prompts of one point of a sweep."""

    def __init__(self, workload: Workload, vocab_size: int, point: int) -> None:
        sign = int(point < 0)  # seeds must not be negative
        self._stream = (sign, abs(point))
        self._workload, self._vocab_size = workload, vocab_size
        self._rng = workload._rng(_TOKENS, *self._stream)
        shape = (workload.num_prefixes, workload.shared_prefix)
        self._prefixes = self._draw(workload._rng(_PREFIXES, *self._stream), shape)
        self._blocks: dict[int, Places] = {}

    def prompt(self, line: Line, prefix: int) -> Places:
        if not line.blocks:
            return np.concatenate([self._prefixes[prefix], self._draw(self._rng, (line.num_input,))])
        known = np.concatenate([self._block(number) for number in line.blocks])[: line.num_input]
        return np.concatenate([known, self._draw(self._rng, (line.num_input - len(known),))])

    def _block(self, number: int) -> Places:
        if number not in self._blocks:
            rng = self._workload._rng(_BLOCKS, *self._stream, number)
            self._blocks[number] = self._draw(rng, (_BLOCK_TOKENS,))
        return self._blocks[number]

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Places:
        return rng.integers(self._vocab_size, size=shape, dtype=np.int32)


def read_trace(path: Path) -> tuple[Line, ...]:
    """Return the lines of a trace: JSON lines with the fields of Mooncake's published traces; other fields are ignored.

    Raises ValueError when the file cannot be read or a line is malformed.
    """
    try:
        rows = [(number, row) for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--trace {path}: {error}") from error
    if not rows:
        raise ValueError(f"--trace {path}: the file is empty")
    lines = [_line(f"--trace {path}, line {number}", row) for number, row in rows]
    if len({line.at is None for line in lines}) > 1:
        raise ValueError(f"--trace {path}: some lines have a timestamp and some do not")
    return tuple(sorted(lines, key=lambda line: line.at or 0.0))


def _line(where: str, text: str) -> Line:
    try:
        row: Any = json.loads(text)
        names = ("input_length", "output_length")
        num_input, num_output = (row[name] for name in names)
        at, blocks = row.get("timestamp"), tuple(row.get("hash_ids", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = '{"input_length": 512, "output_length": 64}'
        raise ValueError(f"{where}: {text[:80]}: expected an object such as {expected}: {error!r}") from error
    counts: Sequence[Any] = (num_input, num_output, *blocks)
    is_whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    is_time = at is None or (isinstance(at, int | float) and at >= 0)
    if not is_whole or min(num_input, num_output) < 1 or not is_time:
        raise ValueError(f"{where}: {text[:80]}: expected lengths of at least 1 and a timestamp in ms of at least 0")
    return Line(num_input=num_input, num_output=num_output, at=None if at is None else at / 1e3, blocks=blocks)


def parse_sweep(text: str) -> list[Load]:
    """Return the loads of a text such as concurrency=1,2,4 or rate=0.5,1; numbers alone are concurrency.

    Raises ValueError for anything else.
    """
    name, _, numbers = text.rpartition("=")
    name = name or "concurrency"
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    is_good = bool(values) and all(value > 0 for value in values)
    if name == "concurrency":
        is_good = is_good and all(value.is_integer() for value in values)
    if name not in ("concurrency", "rate") or not is_good:
        raise ValueError(f"--sweep is {text}, expected concurrency=1,2,4,8 or rate=0.5,1,2")
    kind: Literal["rate", "concurrency"] = "rate" if name == "rate" else "concurrency"
    return [Load(kind=kind, value=value) for value in values]
