"""A toy recurrent layer: what a new kind of state takes. Llama with it in every second layer, or in all.

It computes row by row, so that its bits do not depend on what runs beside a row, and asserts what `StateSpec` promises.
"""

from typing import Any

import torch
from torch import Tensor

from whorl.engine import tensor_parallel
from whorl.engine.launch import Rank
from whorl.models import ARCHITECTURES
from whorl.models.llama import Layer, Llama
from whorl.nn import Linear, Mixer, Ranks, StateSpec, Step

GRID, HEADS, SIZE = 4, 4, 6


class Recurrence(Mixer):
    """state = clamp(decay * state + x); its output is the state times the gate."""

    def __init__(self, config: Any, layer: int, ranks: Ranks) -> None:
        super().__init__()
        heads = ranks.share("recurrent heads", HEADS)
        part = slice(heads.start * SIZE, heads.stop * SIZE)
        width, inner = config.hidden_size, HEADS * SIZE
        self.in_proj = Linear(
            width, {"x_proj": inner, "gate_proj": inner}, shard="column", parts=(part, part), ranks=ranks
        )
        self.out_proj = Linear(inner, width, shard="row", parts=(part,), ranks=ranks)
        self.layer, self.mixed_size = layer, part.stop - part.start
        self.decay = (torch.arange(part.start, part.stop, device="cpu") + 1) / (inner + 2)

    def cache_spec(self, dtype: torch.dtype) -> StateSpec:
        kept = {"state": ((self.mixed_size,), torch.float32)}
        rows = {"rows": ((GRID, self.mixed_size), torch.float32)}  # the state after each token, to go back to
        return StateSpec(kind="toy recurrence", grid=GRID, kept=kept, open=rows, rolls_back=True)

    def flops(self, num_tokens: int) -> float:
        return 3.0 * self.mixed_size * num_tokens

    def forward(self, x: Tensor, mix: Any) -> Tensor:
        return self.out_proj(mix(self, self.in_proj(x)))

    def mix(self, projected: Tensor, rotary: Any, step: Step, cache: dict[str, Tensor]) -> Tensor:
        assert step.lanes is not None
        x, gate = projected.split(self.mixed_size, -1)
        out, starts = torch.zeros_like(x), step.query_starts.tolist()
        for lane, end, *rows in zip(step.lanes.tolist(), step.context_lens.tolist(), starts, starts[1:], strict=False):
            first = end - (rows[1] - rows[0])
            assert first % GRID == 0 or end <= first // GRID * GRID + GRID, "begins on the grid or ends before the next"
            for position, row in enumerate(range(*rows), first):
                state = (self.before(cache, lane, position) * self.decay + x[row].float()).clamp(-2, 2)
                self.keep(cache, lane, position, state)
                out[row] = (state * gate[row].float()).to(x.dtype)
        return out

    def before(self, cache: dict[str, Tensor], lane: int, position: int) -> Tensor:
        return cache["rows"][lane, position % GRID - 1] if position % GRID else cache["state"][lane]

    def keep(self, cache: dict[str, Tensor], lane: int, position: int, state: Tensor) -> None:
        cache["rows"][lane, position % GRID] = state
        if (position + 1) % GRID == 0:
            cache["state"][lane] = state


class Forgetful(Recurrence):
    """Keeps only the last state, so that it cannot go back."""

    def cache_spec(self, dtype: torch.dtype) -> StateSpec:
        kept = {"state": ((self.mixed_size,), torch.float32)}
        return StateSpec(kind="forgetful recurrence", grid=GRID, kept=kept, open={"now": kept["state"]})

    def before(self, cache: dict[str, Tensor], lane: int, position: int) -> Tensor:
        return cache["now" if position % GRID else "state"][lane]

    def keep(self, cache: dict[str, Tensor], lane: int, position: int, state: Tensor) -> None:
        cache["now" if (position + 1) % GRID else "state"][lane] = state


class HybridLayer(Layer):
    """Attention in even layers, the recurrence in odd ones."""

    kind: type[Recurrence] = Recurrence

    def name_of_mixer(self, config: Any, layer: int) -> str:
        return "recurrence" if layer % 2 else super().name_of_mixer(config, layer)

    def attention(self, config: Any, layer: int, ranks: Ranks) -> Mixer:
        mixer = self.kind if self.name_of_mixer(config, layer) == "recurrence" else super().attention
        return mixer(config, layer, ranks)


class ForgetfulLayer(HybridLayer):
    kind = Forgetful


class PureLayer(HybridLayer):
    def name_of_mixer(self, config: Any, layer: int) -> str:
        return "recurrence"


class Hybrid(Llama):
    layer_class = HybridLayer

    @classmethod
    def tiny(cls, **changes: Any) -> dict[str, Any]:
        return super().tiny(**{"architectures": [cls.__name__], "num_hidden_layers": 4, **changes})


class ForgetfulHybrid(Hybrid):
    layer_class = ForgetfulLayer


class Pure(Hybrid):
    layer_class = PureLayer


NAMES = {model.__name__: f"{__name__}:{model.__name__}" for model in (Hybrid, ForgetfulHybrid, Pure)}


def follow(rank: Rank) -> None:
    """Be a rank that knows these models."""
    ARCHITECTURES.update(NAMES)
    tensor_parallel.follow(rank)
