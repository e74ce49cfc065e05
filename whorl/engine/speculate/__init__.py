"""Guessing ahead. A proposer drafts tokens, one step of the target checks them all, and those that plain decoding would
have sampled stay. Acceptance is in `whorl.engine.sampler`: no draft, however bad, changes the output.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as List
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

_REPEATS = 3  # timed calls for each number of rows


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens guessed. probs [len(token_ids), V] fp32: what each was drawn from; None where nothing was drawn."""

    token_ids: list[int]
    probs: "Tensor | None" = None


class Proposer(Protocol):
    """Who drafts. One that asks for the target's hidden states (`wants_hidden`) has a model `beside` the target's. The
    engine gives it a runner of its own, with caches in the same blocks, and tells of every step."""

    k: int  # longest draft
    source: str = "draft"  # what drafted tokens are said to come from
    wants_hidden: bool = False
    beside: "Model | None" = None  # computes from them

    def propose(self, sequences: List[Sequence], k: int) -> list[Draft]:
        """A draft of up to `k` tokens behind each sequence's last token; empty where there is nothing to guess."""

    def cost(self, *, seconds: float) -> Mapping[int, float]:
        """Seconds to draft one token by number of sequences, found in about `seconds`; empty: next to nothing."""
        return {}

    def warm_up(self, max_num_seqs: int) -> Iterable[tuple[str, Callable[[], None]]]:
        """What to run before the first draft, each with words for it: sizes that up to so many sequences need."""
        return ()

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse a target that this proposer cannot draft for, with a ValueError."""
        return

    def load(self, path: "str | Path | None", model: Any) -> None:
        """Where it wants hidden states: have the model `beside` this one. path: None: this was handed in."""
        return

    def attach(self, pool: "BlockPool", runner: "Runner", *, max_rows: int) -> None:
        """Where it wants hidden states: the target's blocks, and a runner of `beside` for calls of `max_rows`."""
        return

    def observe(self, results: "List[Result]") -> None:
        """Where it wants hidden states: those of a step, whose tokens the sequences have by now."""
        return


class Timed(Protocol):
    def cost(self, counts: List[int], *, repeats: int) -> dict[int, float]:
        """Seconds of a decode call by number of rows."""


def measure_cost(runner: Timed, counts: Iterable[int], seconds: float) -> dict[int, float]:
    """Seconds of a decode step by number of rows: two of the rising `counts`, and more in what is left of `seconds`."""
    found: dict[int, float] = {}
    for count in counts:
        found |= runner.cost([count], repeats=_REPEATS)
        seconds -= _REPEATS * found[count]
        if seconds <= 0 and len(found) > 1:
            break
    return found


def cut(draft: list[int], special_ids: Collection[int]) -> list[int]:
    """The draft up to its first special token: what follows a turn's or a tool call's mark is not a continuation."""
    return next((draft[:i] for i, token_id in enumerate(draft) if token_id in special_ids), draft)


def num_agreed(token_ids: List[int], draft: List[int]) -> int:
    """How many tokens, from the first on, are the draft's. In the place of a rejected one there is another."""
    agrees = [token_id == drafted for token_id, drafted in zip(token_ids, draft, strict=False)]
    return next((i for i, agreed in enumerate(agrees) if not agreed), len(agrees))


class DraftLength:
    """How many tokens are worth drafting: 0 when checking them costs more than they bring.

    cost: seconds of a decode step by number of rows (`LLM.measure_cost`); drafting: those of drafting a token by number
    of sequences. Of a draft each token is accepted with probability a if those before it were, so k drafted tokens give
    1 + a + ... + a^k; a is estimated from the drafts seen, recent ones counting most.
    """

    def __init__(
        self,
        cost: Mapping[int, float],
        *,
        drafting: Mapping[int, float] | None = None,
        acceptance: float = 0.7,
        memory: float = 50.0,
        probe: int = 32,
    ) -> None:
        for table in (cost, drafting or {1: 1.0}):
            if not table or any(rows < 1 or seconds <= 0 for rows, seconds in table.items()):
                raise ValueError(f"DraftLength: {dict(table)!r}, expected seconds by number of rows")
        self._cost, self._drafting = dict(sorted(cost.items())), dict(sorted((drafting or {}).items()))
        self._keep = 1 - 1 / memory
        self._probe = probe
        self._num_off = 0
        self._tried = 0.1 * memory  # weight of the first guess
        self._accepted = acceptance * self._tried

    @property
    def acceptance(self) -> float:
        return self._accepted / self._tried

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Tokens behind the first rejected one were never tried."""
        tried = min(num_accepted + 1, num_drafted)
        keep = self._keep**tried
        self._tried = keep * self._tried + tried
        self._accepted = keep * self._accepted + num_accepted

    def choose(self, k: int, num_sequences: int) -> int:
        """Up to k. Where drafting does not pay, one token every `probe` steps finds out when it does again."""
        if num_sequences == 0:
            return 0
        lengths = np.arange(k + 1)
        gain = np.cumsum(self.acceptance**lengths)
        seconds = _seconds(self._cost, num_sequences * (lengths + 1))
        if self._drafting:
            seconds = seconds + lengths * _seconds(self._drafting, np.array([num_sequences]))
        best = int(np.argmax(gain / seconds))
        self._num_off = 0 if best else self._num_off + 1
        if self._num_off > self._probe:
            self._num_off = 0
            return min(1, k)
        return best


def _seconds(table: Mapping[int, float], rows: np.ndarray) -> np.ndarray:
    """Interpolated; beyond the table another row costs what it did between the last two entries."""
    known, seconds = list(table), list(table.values())
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])) if len(known) > 1 else seconds[0] / known[0]
    return np.interp(rows, known, seconds) + slope * np.maximum(rows - known[-1], 0)
