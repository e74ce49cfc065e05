"""A sequence: one prompt, the tokens generated for it, and how much of it is in the cache."""

import itertools
import time
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from .sampling_params import SamplingParams
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from .adjust import TokenCounts
    from .placing import Placement

_NUMBERS = itertools.count()
_SEED_STRIDE = 0x9E3779B97F4A7C15  # golden ratio: seeds of neighbouring copies share no pattern
_LEAST_DIGEST = 16  # bytes


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens is reached, or the context is full
    ABORT = "abort"
    ERROR = "error"  # see `Sequence.error`


class AllowError(ValueError):
    """Raised by `SamplingParams.allow` when it cannot tell which tokens may follow. It ends that sequence only."""


class WeightsError(RuntimeError):
    """The engine cannot do this with the weights that it has now: they are torn, asleep, or being updated."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, before filters unless the settings say otherwise, and the likeliest alternatives.

    rank: of the token, counted from 1, where it is reported: for tokens of a prompt.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = field(default=0, compare=False)


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, one at a time."""

    def add(self, token_id: int) -> str:
        """Return the text that the token completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """Return the text of an incomplete character at the end."""


class Tokenizer(Protocol):
    """The methods and attributes of a tokenizer that the engine uses."""

    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    added_ids: frozenset[int]

    def __len__(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def token(self, token_id: int) -> str: ...
    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer: ...


def detokenizer_for(params: SamplingParams, tokenizer: Tokenizer | None) -> Detokenizer | None:
    """Return what turns the tokens of a request into text; None without a tokenizer."""
    return None if tokenizer is None else tokenizer.detokenizer(skip_special=params.skip_special)


class Text:
    """The text of a sequence as it grows; it ends before the first stop string, which may span several tokens."""

    def __init__(
        self, detokenizer: Detokenizer | None, stop: abc.Sequence[str] = (), *, include_stop: bool = False
    ) -> None:
        self.value = ""
        self.match: str | None = None  # the stop string that ended the text
        self._detokenizer, self._stops, self._include_stop = detokenizer, StopStrings(stop), include_stop
        self._num_sent = 0

    def add(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Append a token's text; return True when it completes a stop string, which then ends the text.

        may_stop: False ignores stop strings, because min_tokens is not reached.
        """
        if self._detokenizer is None:
            return False
        piece = self._detokenizer.add(token_id)
        self.value += piece
        matches = self._stops.add(piece)
        if not matches or not may_stop:
            return False
        start, self.match = min(matches)
        self.value = self.value[: start + (len(self.match) if self._include_stop else 0)]
        return True

    def finish(self) -> None:
        """Append what the detokenizer holds back."""
        if self._detokenizer is not None and self.match is None:
            self.value += self._detokenizer.finish()

    def take(self, *, is_finished: bool) -> str:
        """Return the text since the last call. Unless finished, a possible beginning of a stop string is held back."""
        end = len(self.value) - (0 if is_finished else self._stops.num_held)
        piece, self._num_sent = self.value[self._num_sent : end], max(end, self._num_sent)
        return piece


@dataclass(slots=True)
class Timings:
    """When a sequence was added, first computed, gave its first token and finished, in seconds of time.perf_counter.

    admitted: set by a server alone.
    """

    added: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from adding the sequence to its first token; None before that."""
        return None if self.first_token is None else self.first_token - self.added

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed: tokens after the first over the time they took."""
        if self.first_token is None or self.finished is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / max(self.finished - self.first_token, 1e-9)


@dataclass(frozen=True, slots=True)
class Content:
    """What a span of placeholder tokens stands for, such as an image: equal token ids do not mean equal content. The
    prefix cache tells contents apart by it.

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


class Sequence:
    """A prompt and the tokens generated for it. Keys and values of the first `num_computed` tokens are in the cache.

    max_len: the longest that the engine can hold. seed: used if `params` has none. copy: number of this sequence among
    the `n` of its request; each has another seed. contents, placement: what placeholder tokens stand for. after: the
    first copy of the same prompt, whose blocks this one waits for and shares.
    """

    def __init__(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        max_len: int,
        seed: int = 0,
        copy: int = 0,
        contents: Iterable[Content] = (),
        placement: "Placement | None" = None,
        eos_ids: Iterable[int] = (),
        detokenizer: Detokenizer | None = None,
        after: "Sequence | None" = None,
    ) -> None:
        self.id = next(_NUMBERS)
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.placement = placement  # where images and videos are; None: text only
        media_contents = () if placement is None else placement.contents
        self.contents = sorted_contents((*contents, *media_contents), self.prompt_len)
        self.features: dict[int, int] = {}  # of images still needed: the encoder's number, by index in the placement
        self.params, self.copy, self.after = params, copy, after
        self.client, self.priority = params.client, params.priority
        self.adapter: str | None = None  # the identity of what is added to the model's weights for it
        self.slot = -1  # that its adapter has on the device; -1: it has none
        self.vision_slot = -1  # the same, if its adapter updates the vision tower
        self.is_plain = params.is_plain
        fork = getattr(params.allow, "fork", None)
        self.allow = params.allow if fork is None else fork()
        self.error: AllowError | None = None
        self.counts: TokenCounts | None = None  # of generated tokens, for penalties; set by adjust.py
        self.filters = params.filters
        base_seed = params.seed if params.seed is not None else seed
        self.seed = (base_seed + copy * _SEED_STRIDE + 2**63) % 2**64 - 2**63  # wraps into int64
        limit = max_len if params.max_tokens is None else self.prompt_len + params.max_tokens
        self.max_len = min(max_len, limit)
        self.eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self.stop_ids = self.eos_ids | set(params.stop_token_ids)
        self.text = Text(detokenizer, params.stop, include_stop=params.include_stop)
        self.block_table: list[int] = []
        self.chain: list[int] = []  # names of the full blocks' prefixes, see blocks.py
        self.digests: tuple[bytes, list[str]] = b"", []  # names of prefixes in all processes, and what they begin with
        self.reads: set[int] = set()  # of files that have a part of its prefix, see offload.py
        self.lane = -1  # its index into the device-side buffers while it runs, else -1
        self.is_new = False  # whether its block table must still be sent to the device
        self.num_computed = 0
        self.num_in_state = self.branch = 0  # tokens that its state includes; that others have computed: states.py
        self.num_unread = 0  # tokens sampled on the device that the host has not seen
        self.num_cached = 0  # tokens found in the prefix cache on first admission
        self.num_preempted = 0
        self.last_shared = 0  # the last step shared by clients in which it decoded
        self.num_drafted = self.num_accepted = 0
        # The version of the weights that each run of its tokens was sampled with, and the first output of the run.
        self.weight_versions: list[tuple[str, int]] = []
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob] = []  # of the prompt tokens from the second on
        # Of every token but the last, by layer, [T - 1, L, K]; if the setting is on, when the sequence has ended.
        self.routed_experts: NDArray[Any] | None = None
        self.embedding: Tensor | None = None  # [hidden size] fp32 on the host
        self.timings = Timings()

    def __repr__(self) -> str:
        state = self.finish_reason or f"{self.num_computed} computed"
        return f"<sequence {self.id}: {self.prompt_len} + {self.num_outputs} tokens, {state}>"

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def length(self) -> int:
        """Number of tokens, including those sampled on the device that the host has not read."""
        return len(self.token_ids) + self.num_unread

    @property
    def num_pending(self) -> int:
        """Number of tokens that are not in the cache; when decoding, this is the one sampled last."""
        return len(self.token_ids) + self.num_unread - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next token to compute is a generated one."""
        return self.num_computed >= self.prompt_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_unscored(self) -> int:
        """Prompt positions that are still to be scored: they must be computed, not taken from the prefix cache."""
        return 0 if self.params.prompt_logprobs is None else self.prompt_len - 1 - len(self.prompt_logprobs)

    def restart(self, detokenizer: Detokenizer | None) -> None:
        """Discard what was generated, so that it is computed again from the prompt on. It must not be running."""
        assert not self.block_table, f"{self!r} holds blocks"
        del self.token_ids[self.prompt_len :]
        self.text = Text(detokenizer, self.params.stop, include_stop=self.params.include_stop)
        fork = getattr(self.params.allow, "fork", None)
        self.allow, self.counts = self.params.allow if fork is None else fork(), None
        self.logprobs, self.prompt_logprobs, self.weight_versions, self.embedding = [], [], [], None
        self.num_drafted = self.num_accepted = self.num_cached = 0
        self.digests = b"", []
        self.timings = Timings(added=self.timings.added)

    def append(self, token_id: int, logprob: Logprob | None = None) -> None:
        """Append a sampled token; finish the sequence if the token ends it."""
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.timings.num_tokens += 1
        if self.timings.first_token is None:
            self.timings.first_token = time.perf_counter()
        if token_id in self.stop_ids or self.text.add(token_id, may_stop=self.num_outputs >= self.params.min_tokens):
            self.finish(FinishReason.STOP)
        elif len(self.token_ids) >= self.max_len:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason) -> None:
        """Mark the sequence as finished and complete its text."""
        self.finish_reason = reason
        self.timings.finished = time.perf_counter()
        self.text.finish()
