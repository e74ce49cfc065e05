"""The number of prompt tokens that a step may compute; on a slow device it is chosen to keep steps short.

Decoding sequences wait for a step to end, and so does Ctrl-C. How a prompt is cut into chunks changes no bit of the
output.
"""

from whorl.device import HOST
from whorl.ops.attention.tiles import ROWS as TILE

_SECONDS = 0.5  # about how long a step with prompts should take
_FASTEST_GROWTH = 4  # from one step to the next, because one step may have been fast by accident


class StepBudget:
    """The prompt tokens of a step. most: upper limit; fixed: always this number; None: `most`, or on a CPU as many as
    the measured time of steps allows. Raises ValueError if `fixed` is above `most`."""

    def __init__(self, most: int, *, device: str, fixed: int | None = None) -> None:
        if fixed is not None and not 1 <= fixed <= most:
            raise ValueError(f"max_prompt_tokens is {fixed}, expected 1 to max_num_batched_tokens, which is {most}")
        self._most, self._is_timed = most, fixed is None and device == HOST
        # The first step shows how fast the model is; a tile of tokens costs as much as one token.
        self.tokens = fixed or (min(TILE, most) if self._is_timed else most)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Note the seconds of a step that computed `num_tokens` of prompts."""
        # The time of a small step says little about a large one: reading the weights has a fixed cost.
        if not self._is_timed or (2 * num_tokens < self.tokens and seconds < _SECONDS):
            return
        target = min(num_tokens * _SECONDS / max(seconds, 1e-9), _FASTEST_GROWTH * self.tokens)
        self.tokens = min(self._most, max(TILE, int(target) // TILE * TILE))
