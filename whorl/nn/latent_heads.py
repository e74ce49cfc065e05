"""The up-projection of latent attention, by head: queries are absorbed into the latent space, latents become values."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whorl import ops

from .linear import Linear
from .ranks import Ranks
from .weight import Adapter, Format
from .weights.dense import DENSE, Dense


class LatentHeads(Linear):
    """kv_b_proj [H (Dn + Dv), Dc], split by head.

    H: heads; Dn: channels of a head's key that are not rotated (nope); Dv: of its value; Dc: of the latent. The matrix
    is multiplied head by head, never as a whole, so it is stored in the model's dtype whatever the checkpoint's format:
    quantised values are unpacked once, at loading. Ranks shard the heads.
    """

    takes_adapters = False

    def __init__(self, heads: Mapping[str, int], rank: int, *, rank_heads: slice, ranks: Ranks) -> None:
        """Build the projection for this rank's heads.

        heads: {"count": heads of all ranks together, "nope": Dn, "value": Dv}; rank: Dc, the channels of the latent
        (kv_lora_rank); rank_heads: the heads of this rank.
        """
        self.nope = heads["nope"]
        head_rows = self.nope + heads["value"]
        rows = slice(rank_heads.start * head_rows, rank_heads.stop * head_rows)
        super().__init__(rank, heads["count"] * head_rows, shard="column", parts=(rows,), ranks=ranks)
        self.num_heads = rank_heads.stop - rank_heads.start

    @property  # type: ignore[override]
    def adapter(self) -> None:
        """None: an adapter adds to the product of a matrix, and this one has no product as a whole."""

    @adapter.setter
    def adapter(self, adapter: Adapter | None) -> None:
        raise ValueError(
            f"{self.name}: this matrix is multiplied head by head, so an adapter cannot add to its product; merge the "
            "update into the weights"
        )

    def finish(self) -> None:
        if not isinstance(self.format, Dense):
            self.format.finish(self)
            self.replace(weight=self.format.values(self))
            self.format = DENSE

    def unpack(self, plain: Format) -> None:
        pass  # `finish` has unpacked it

    def randomize(self, generator: torch.Generator) -> None:
        if not isinstance(self.format, Dense):
            self.replace(weight=torch.empty(self.shape, dtype=self.dtype, device=generator.device))
            self.format = DENSE
        super().randomize(generator)

    def absorb(self, q: Tensor) -> Tensor:
        """Return queries [T, H, Dc] in the latent space, from q [T, H, Dn].

        A head's key is W latent, so q . key = (W^T q) . latent: W^T q is the query returned here.
        """
        return ops.head_linear.unchecked(q, self._by_head()[:, : self.nope].transpose(1, 2))  # type: ignore[no-any-return]

    def values(self, latents: Tensor) -> Tensor:
        """Return values [T, H, Dv] from each head's weighted sum of latents, [T, H, Dc]."""
        return ops.head_linear.unchecked(latents, self._by_head()[:, self.nope :])  # type: ignore[no-any-return]

    def _by_head(self) -> Tensor:
        return self.weight.unflatten(0, (self.num_heads, -1))
