"""Faults of the states of sequences: tests plant them, to show that they can fail."""

from typing import Any

import pytest

from whorl import nn
from whorl.engine.runner import Runner
from whorl.engine.sequence import Sequence
from whorl.engine.states import StatePool


def skip_the_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.States, "load", lambda self, lane, snapshot: self.clear(lane))


def save_under_a_shorter_prefix(patch: pytest.MonkeyPatch) -> None:
    save = StatePool.save

    def wrong(self: StatePool, seq: Sequence) -> None:
        seq.num_in_state -= self.grid
        save(self, seq)
        seq.num_in_state += self.grid

    patch.setattr(StatePool, "save", wrong)


def move_after_the_call(patch: pytest.MonkeyPatch) -> None:
    run_call = Runner.run_call

    def late(self: Runner, call: Any, states: Any = None) -> Any:
        moves, call.moves = call.moves, []
        result = run_call(self, call, states)
        for move in moves:
            self._move(move)
        return result

    patch.setattr(Runner, "run_call", late)
