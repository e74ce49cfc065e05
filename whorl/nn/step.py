"""The tensors of one forward call."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .ranks import own_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Inserted:
    """Features that some tokens of a call get in place of or beside their embeddings, such as those of an image.

    features: [T, C] each, zero for other tokens. The first replaces the embeddings, the second is added after layer 0,
    the third after layer 1, and so on (deepstack).
    """

    mask: Tensor  # [T, 1] bool: tokens that have features
    features: tuple[Tensor, ...]

    def own(self) -> "Inserted":
        """Return the features of this rank's tokens, where ranks share them."""
        return Inserted(mask=own_tokens(self.mask), features=tuple(own_tokens(x) for x in self.features))

    def embed(self, x: Tensor) -> Tensor:
        """Return x [T, C] with the embeddings of masked tokens replaced."""
        return torch.where(self.mask, self.features[0], x)

    def add(self, x: Tensor, layer: int) -> Tensor:
        """Return x [T, C] with the features added that belong after `layer`."""
        return x + self.features[layer + 1] if layer + 1 < len(self.features) else x


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tensors of one forward call: T tokens of B sequences, one sequence after the other.

    max_position: highest position + 1, known on the host so that nothing waits for the device. decoding_from: in a call
    of prompts and decoding sequences, the first token and the first sequence of those that decode, which come last.
    is_decode: all sequences decode, a token and the draft after it, for which a layer may have another kernel.
    may_draft: whether there may be a draft.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, or [A, T] where they have several axes
    slots: Tensor  # [T] int64: block * block_size + offset of each token's cache entry; -1 writes none
    block_tables: Tensor  # [B, MB] int32: cache blocks of each sequence in order, up to MB
    query_starts: Tensor  # [B + 1] int32: where the tokens of each sequence begin
    context_lens: Tensor  # [B] int32: keys that the last query of each sequence sees, new tokens included
    max_position: int
    inserted: Inserted | None = None
    states: Tensor | None = None  # [T, C]: hidden states of another model, for one that drafts from them
    decoding_from: tuple[int, int] | None = None
    lanes: Tensor | None = None  # [B] int64: the lane of each sequence, where layers have a state (`StateSpec`)
    is_decode: bool = False
    may_draft: bool = True

    def parts(self) -> tuple["Step", ...]:
        """Return the prompts and the decoding sequences as steps of their own; the step itself if it has only one kind.

        Attention runs by parts, because it has kernels for each kind. All else takes the tokens together.
        """
        if self.decoding_from is None:
            return (self,)
        token, sequence = self.decoding_from
        prompts = replace(
            self,
            token_ids=self.token_ids[:token],
            positions=self.positions[..., :token],
            slots=self.slots[:token],
            block_tables=self.block_tables[:sequence],
            query_starts=self.query_starts[: sequence + 1],
            context_lens=self.context_lens[:sequence],
            decoding_from=None,
            lanes=None if self.lanes is None else self.lanes[:sequence],
        )
        # Copies, because kernels are compiled for tensors that begin at multiples of 16 bytes, as a call's do.
        decoding = replace(
            self,
            token_ids=self.token_ids[token:].clone(),
            positions=self.positions[..., token:].clone(),
            slots=self.slots[token:].clone(),
            block_tables=self.block_tables[sequence:].clone(),
            # In a recorded call padding lies between the end of the last prompt and the first token that decodes.
            query_starts=(self.query_starts[sequence:] - token).clamp(min=0),
            context_lens=self.context_lens[sequence:].clone(),
            decoding_from=None,
            is_decode=True,
            lanes=None if self.lanes is None else self.lanes[sequence:].clone(),
        )
        return prompts, decoding
