"""How many tokens of prompts one step may take: where computing is slow, as many as keep a step short.

Those that decode wait for a step to end, and so does Ctrl-C. How a prompt is cut changes no bit of what comes out.
"""

from whorl.device import HOST
from whorl.ops.attention.paged import ROWS as TILE

_SECONDS = 0.5  # that a step with prompts should take, about
_FASTEST_GROWTH = 4  # a step may have been fast by accident


class StepBudget:
    """most: never more tokens than these. fixed: always these; None: by device, and on a CPU by what steps take."""

    def __init__(self, most: int, *, device: str, fixed: int | None = None) -> None:
        if fixed is not None and not 1 <= fixed <= most:
            raise ValueError(f"max_prompt_tokens is {fixed}, expected 1 to max_num_batched_tokens, which is {most}")
        self._most, self._is_timed = most, fixed is None and device == HOST
        # The first step tells how fast the model is; one tile of rows costs as much as a row.
        self.tokens = fixed or (min(TILE, most) if self._is_timed else most)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """What a step took that ran `num_tokens` of prompts."""
        # A step that was not full says little about one that is: reading the weights takes its time, too.
        if not self._is_timed or (2 * num_tokens < self.tokens and seconds < _SECONDS):
            return
        wanted = min(num_tokens * _SECONDS / max(seconds, 1e-9), _FASTEST_GROWTH * self.tokens)
        self.tokens = min(self._most, max(TILE, int(wanted) // TILE * TILE))
