"""Speculative decoding. A proposer drafts tokens, one step of the target verifies all of them, and those that plain
decoding would have sampled are accepted. Acceptance is in `whorl.engine.sampler`: no draft, however bad, changes the
output.
"""

from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from whorl.engine.sequence import Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from whorl.engine.blocks import BlockPool
    from whorl.engine.runner import Result, Runner
    from whorl.nn import Model

_REPEATS = 3  # timed calls for each number of tokens
_MEMORY = 50.0  # tokens that the estimate of `DraftLength` remembers
_PROBE = 32  # steps after which a token is drafted again, while drafting does not pay


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens. probs [len(token_ids), V] fp32: the distributions that they were sampled from; None if they were
    not sampled, or with the target's own noise."""

    token_ids: list[int]
    probs: "Tensor | None" = None


class Proposer(Protocol):
    """Drafts tokens. A proposer that uses the target's hidden states (`wants_hidden`) has a second model, its
    `draft_head`. The engine gives it a separate runner, with caches in the target's blocks, and every step's results.
    """

    k: int  # longest draft
    source: str = "draft"  # name of the origin of drafted tokens in outputs
    wants_hidden: bool = False
    has_weights: bool = False  # whether it drafts with a model or a head of its own
    draft_head: "Model | None" = None  # computes drafts from the target's hidden states

    def propose(self, sequences: abc.Sequence[Sequence], k: int) -> list[Draft]:
        """Return a draft of up to `k` tokens after each sequence's last token; it may be empty."""

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        """Return the seconds to draft one token by number of sequences, timed in about `seconds`; empty: negligible."""
        return {}

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        """Return descriptions and functions to run before the first draft, for up to `max_num_seqs` sequences."""
        return ()

    def check(self, model: Any, tokenizer: Any) -> None:
        """Raise ValueError if this proposer cannot draft for the target."""
        return

    def load(self, path: "str | Path | None", model: Any) -> None:
        """Load the draft head, if it uses hidden states. path: the target's checkpoint; None: there is only a model."""
        return

    def shared_path(self, path: "Path") -> "Path":
        """Return the checkpoint from which every rank loads its shard of the draft head's layer of multi-token
        prediction. path: the target's checkpoint. Raises ValueError if the other ranks cannot load it."""
        raise ValueError(
            f"{type(self).__name__}: with several ranks its draft head has to be loaded by every rank, and it has no "
            "`shared_path`; use tp=1 or another proposer"
        )

    def attach(self, pool: "BlockPool", runner: "Runner", *, max_rows: int) -> None:
        """Receive the target's blocks and the runner of the draft head, if it uses hidden states. max_rows: the most
        tokens of one call."""
        return

    def observe(self, results: "abc.Sequence[Result]") -> None:
        """Receive the hidden states of a step, if it uses them; the sequences already have the step's tokens."""
        return


def measure_cost(runner: "Runner", counts: Iterable[int], seconds: float) -> dict[int, float]:
    """Return the seconds of a decode step by number of tokens: at least two of the rising `counts`, and more until
    `seconds` are spent."""
    cost: dict[int, float] = {}
    for count in counts:
        cost |= runner.cost([count], repeats=_REPEATS)
        seconds -= _REPEATS * cost[count]
        if seconds <= 0 and len(cost) > 1:
            break
    return cost


def cut(draft: list[int], special_ids: Collection[int]) -> list[int]:
    """Return the draft up to its first special token: text after the end of a turn or of a tool call cannot be guessed
    from text before it."""
    return next((draft[:i] for i, token_id in enumerate(draft) if token_id in special_ids), draft)


def num_agreed(token_ids: abc.Sequence[int], draft: abc.Sequence[int]) -> int:
    """Return how many of a step's tokens, from the first on, equal the draft. These were accepted: at a rejected
    position the target's token differs from the drafted one."""
    agrees = [token_id == drafted for token_id, drafted in zip(token_ids, draft, strict=False)]
    return next((i for i, agreed in enumerate(agrees) if not agreed), len(agrees))


class DraftLength:
    """Chooses how many tokens to draft: 0 when verifying them costs more than they gain.

    cost: seconds of a decode step by number of tokens (`LLM.measure_cost`); drafting: seconds to draft one token, by
    number of sequences. Each token of a draft is accepted with probability a if those before it were, so k drafted
    tokens give 1 + a + ... + a^k tokens; a is estimated from past drafts, recent ones counting most. acceptance: the
    initial a. While drafting does not pay, one token is drafted every 32 steps. Raises ValueError for an empty table or
    times that are not positive.
    """

    def __init__(
        self,
        cost: Mapping[int, float],
        *,
        drafting: Mapping[int, float] | None = None,
        acceptance: float = 0.7,
    ) -> None:
        for table in (cost, drafting or {1: 1.0}):
            if not table or any(count < 1 or seconds <= 0 for count, seconds in table.items()):
                raise ValueError(f"DraftLength: {dict(table)!r}, expected positive seconds by number of tokens")
        self._cost, self._drafting = dict(sorted(cost.items())), dict(sorted((drafting or {}).items()))
        self._num_off = 0
        self._tried = 0.1 * _MEMORY  # weight of the initial value
        self._accepted = acceptance * self._tried

    @property
    def acceptance(self) -> float:
        """The present estimate of the share of drafted tokens that are accepted."""
        return self._accepted / self._tried

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Update the estimate; tokens after the first rejected one were never tried."""
        tried = min(num_accepted + 1, num_drafted)
        keep = (1 - 1 / _MEMORY) ** tried
        self._tried = keep * self._tried + tried
        self._accepted = keep * self._accepted + num_accepted

    def choose(self, k: int, num_sequences: int) -> int:
        """Return the best draft length up to k. While drafting does not pay, one token every 32 steps tests if it does
        again."""
        if num_sequences == 0:
            return 0
        lengths = np.arange(k + 1)
        gain = np.cumsum(self.acceptance**lengths)
        seconds = _seconds(self._cost, num_sequences * (lengths + 1))
        if self._drafting:
            seconds = seconds + lengths * _seconds(self._drafting, np.array([num_sequences]))
        best = int(np.argmax(gain / seconds))
        self._num_off = 0 if best else self._num_off + 1
        if self._num_off > _PROBE:
            self._num_off = 0
            return min(1, k)
        return best


def _seconds(table: Mapping[int, float], counts: np.ndarray) -> np.ndarray:
    """Interpolate the table; beyond its end extrapolate with the slope between the last two entries."""
    known, seconds = list(table), list(table.values())
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])) if len(known) > 1 else seconds[0] / known[0]
    return np.interp(counts, known, seconds) + slope * np.maximum(counts - known[-1], 0)
