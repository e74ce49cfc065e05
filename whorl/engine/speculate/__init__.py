"""Guessing ahead. A proposer drafts tokens, one step of the target checks them all, and those that plain decoding would
have sampled stay. Acceptance is in `whorl.engine.sampler`: no draft, however bad, changes the output.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as List
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from whorl.engine.sequence import Sequence

PROPOSERS = {"prompt_lookup": "whorl.engine.speculate.prompt_lookup:PromptLookup"}


class Proposer(Protocol):
    k: int  # longest draft

    def propose(self, sequences: List[Sequence]) -> list[list[int]]:
        """A draft of up to `k` tokens behind each sequence's last token; empty where there is nothing to guess."""


def make_proposer(name: str, **options: Any) -> Proposer:
    if name not in PROPOSERS:
        raise ValueError(f"speculate: {name!r} is not one of {', '.join(PROPOSERS)}")
    module, _, class_name = PROPOSERS[name].partition(":")
    return getattr(import_module(module), class_name)(**options)


def cut(draft: list[int], special_ids: Collection[int]) -> list[int]:
    """The draft up to its first special token: what follows a turn's or a tool call's mark is not a continuation."""
    return next((draft[:i] for i, token_id in enumerate(draft) if token_id in special_ids), draft)


class DraftLength:
    """How many tokens are worth drafting: 0 when checking them costs more than they bring.

    cost: seconds of a decode step by number of rows (`LLM.measure_cost`). Of a draft each token is accepted with
    probability a if those before it were, so k drafted tokens give 1 + a + ... + a^k; a is estimated from the drafts
    seen, recent ones counting most.
    """

    def __init__(
        self, cost: Mapping[int, float], *, acceptance: float = 0.7, memory: float = 50.0, probe: int = 32
    ) -> None:
        if not cost or any(rows < 1 or seconds <= 0 for rows, seconds in cost.items()):
            raise ValueError(f"DraftLength: cost is {dict(cost)!r}, expected seconds by number of rows")
        self._rows, self._seconds = zip(*sorted(cost.items()), strict=True)
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
        gain = np.cumsum(self.acceptance ** np.arange(k + 1))
        best = int(np.argmax(gain / self._cost(num_sequences * np.arange(1, k + 2))))
        self._num_off = 0 if best else self._num_off + 1
        if self._num_off > self._probe:
            self._num_off = 0
            return min(1, k)
        return best

    def _cost(self, rows: np.ndarray) -> np.ndarray:
        """Interpolated; beyond the table rows cost what the last ones did on average."""
        beyond = np.maximum(rows / self._rows[-1], 1)
        return np.interp(rows, self._rows, self._seconds) * beyond
