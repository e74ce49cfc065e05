"""Context parallelism of sparse attention: gather what a rank needs of the keys of other ranks."""

from torch import Tensor, nn

from whorl.titan.context_parallel import ContextParallelAttention
from whorl.titan.deepseek_v32.attention import Attention
from whorl.titan.local import local
from whorl.titan.tensor_parallel import to_heads


class ContextParallelDSA(ContextParallelAttention):
    """Context parallelism of DeepSeek's sparse attention.

    A query needs of another token only its latent key, the rotary part of that key, the indexer's key and the position:
    704 channels and a number, for any number of heads. The indexer scores the queries of this rank, the attention over
    their selected keys is computed as usual, and the indexer loss is a sum over these queries divided by the tokens of
    all ranks.
    """

    def apply(self, attention: nn.Module) -> None:
        assert isinstance(attention, Attention)
        attention.gather_keys = self.gather_keys

    def gather_keys(
        self, kv: Tensor, k_pe: Tensor, index_k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the arguments [B, S, ...] of this rank gathered from all ranks, in the order of the sequence.

        Raises ValueError when there are no positions.
        """
        if positions is None:
            raise ValueError(
                "context parallelism: the model is called without positions, so that the order of the ranks' tokens is "
                "unknown; pass the positions that TorchTitan shards with the tokens"
            )
        # With tensor parallelism these are replicated; from here on each rank uses them for its own heads.
        keys = (to_heads(kv), to_heads(k_pe), local(index_k))
        kv, k_pe, index_k, k_positions = self.gather(*keys, positions)
        return kv, k_pe, index_k, k_positions
