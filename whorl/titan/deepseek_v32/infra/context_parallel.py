"""Context parallelism of sparse attention: what a rank needs of the keys that others hold."""

from torch import Tensor, nn

from whorl.titan.context_parallel import ContextParallelAttention
from whorl.titan.deepseek_v32.attention import Attention
from whorl.titan.tensor_parallel import to_heads, to_local


class ContextParallelDSA(ContextParallelAttention):
    """For DeepSeek's sparse attention. All that a query needs of another token is its latent key, that key's rotary
    part, the indexer's key and the position: 704 channels and a number, whatever the number of heads.

    The indexer scores the own queries only, their chosen keys are attended to as without context parallelism, and
    the indexer's loss is a sum over own queries divided by the tokens of all ranks.
    """

    def apply(self, attention: nn.Module) -> None:
        assert isinstance(attention, Attention)
        attention.gather_keys = self.gather_keys

    def gather_keys(
        self, kv: Tensor, k_pe: Tensor, index_k: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if positions is None:
            raise ValueError(
                "context parallelism: the model is called without positions, so the order of the ranks' tokens is "
                "unknown; pass those that TorchTitan cut together with the tokens"
            )
        # Tensor parallelism hands over what all of its ranks hold; from here on each goes to its own heads.
        keys = (to_heads(kv), to_heads(k_pe), to_local(index_k))
        kv, k_pe, index_k, places = self.gather(*keys, positions)
        return kv, k_pe, index_k, places
