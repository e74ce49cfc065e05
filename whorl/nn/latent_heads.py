"""The up projection of latent attention, by head: absorbed queries meet latents, and latents become values."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whorl import ops

from .linear import Linear
from .ranks import Ranks
from .weight import Format
from .weights.dense import DENSE, Dense


class LatentHeads(Linear):
    """kv_b_proj [H (Dn + Dv), Dc]: never multiplied as a whole, so it is held in the model's dtype, whatever the
    checkpoint's format: quantised values are read once. Ranks share the heads."""

    def __init__(self, heads: Mapping[str, int], rank: int, *, mine: slice, ranks: Ranks) -> None:
        """heads: "count" of all ranks together, "nope" and "value" channels of each; mine: this rank's."""
        self.nope = heads["nope"]
        each = self.nope + heads["value"]
        rows = slice(mine.start * each, mine.stop * each)
        super().__init__(rank, heads["count"] * each, shard="column", parts=(rows,), ranks=ranks)
        self.num_heads = mine.stop - mine.start

    def finish(self) -> None:
        if not isinstance(self.format, Dense):
            self.format.finish(self)
            self.replace(weight=self.format.values(self))
            self.format = DENSE

    def unpack(self, plain: Format) -> None:
        pass  # it is

    def randomize(self, generator: torch.Generator) -> None:
        if not isinstance(self.format, Dense):
            self.replace(weight=torch.empty(self.shape, dtype=self.dtype, device=generator.device))
            self.format = DENSE
        super().randomize(generator)

    def absorb(self, q: Tensor) -> Tensor:
        """[T, H, Dc] of queries [T, H, Dn]: their products with latents are those of q with keys."""
        return ops.head_linear.unchecked(q, self._by_head()[:, : self.nope].transpose(1, 2))  # type: ignore[no-any-return]

    def values(self, latents: Tensor) -> Tensor:
        """[T, H, Dv] of what each head has gathered, [T, H, Dc]."""
        return ops.head_linear.unchecked(latents, self._by_head()[:, self.nope :])  # type: ignore[no-any-return]

    def _by_head(self) -> Tensor:
        return self.weight.unflatten(0, (self.num_heads, -1))
