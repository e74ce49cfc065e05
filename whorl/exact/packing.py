"""Sequences of a trainer's batch, one after the other and without padding, as the engine's arithmetic takes them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the T tokens of a batch [B, S] lie.

    tokens: [T] their indices in the flattened batch; None: all, in order. positions: [T], from 0 in each sequence.
    starts: [N + 1] int32, the first token of each of the N sequences, and T. longest: tokens of the longest sequence.
    """

    tokens: Tensor | None
    positions: Tensor
    starts: Tensor
    longest: int

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, S, ...] that are tokens, [1, T, ...]."""
        rows = x.flatten(0, 1)
        return (rows if self.tokens is None else rows[self.tokens])[None]

    def unpack(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Return x [1, T, ...] in a batch of shape [B, S]; padding is zero."""
        rows = x[0]
        if self.tokens is not None:
            rows = rows.new_zeros(shape.numel(), *rows.shape[1:]).index_copy(0, self.tokens, rows)
        return rows.unflatten(0, shape)


@torch.compiler.disable  # what it reads decides shapes
def packing(
    shape: torch.Size,
    device: torch.device,
    *,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    starts: Tensor | None = None,
) -> Packing:
    """Return where the tokens of a batch of `shape` [B, S] lie.

    mask: [B, S], 0 for padding, on either side. positions: [B, S] or [1, S]; where one is 0 a sequence begins, as it
    does with every row. starts: [N + 1], cu_seqlens of the flattened batch. Without these a row is a sequence.
    Raises ValueError for positions that do not run from 0 upwards in each sequence: the engine has no others.
    """
    batch, length = shape
    if mask is not None and (mask.dim() != 2 or mask.shape != shape):
        raise ValueError(
            f"whorl.exact: attention_mask is {list(mask.shape)}, expected {list(shape)}: 1, or 0 for padding"
        )
    is_token = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask.to(device).bool()
    tokens = is_token.flatten().nonzero().flatten()
    rises = (is_token.int().diff(dim=1) > 0).sum(1)  # where padding ends
    if bool((rises > (~is_token[:, 0]).int()).any()):
        raise ValueError("whorl.exact: attention_mask has 0 between the tokens of a row, expected it on either side")
    count = len(tokens)
    if not count:
        raise ValueError("whorl.exact: the batch has no token")
    if starts is not None:
        ends = [int(starts[0]), int(starts[-1])]
        if ends != [0, count] or bool((starts.diff() < 1).any()):
            raise ValueError(f"whorl.exact: cu_seqlens run from {ends[0]} to {ends[1]}, expected 0 to {count}, rising")
    own = None if positions is None else positions.to(device).expand(shape).flatten()[tokens]
    is_first = torch.zeros(count, dtype=torch.bool, device=device)
    if starts is not None:
        is_first[starts[:-1].long().to(device)] = True
    else:
        rows = tokens // length
        is_first = torch.cat([rows.new_ones(1), rows.diff()]).bool()
        is_first |= torch.zeros_like(is_first) if own is None else own == 0
    first = is_first.nonzero().flatten()
    numbers = torch.arange(count, device=device) - first[is_first.cumsum(0) - 1]
    if own is not None:
        _check(own, numbers)
    bounds = torch.cat([first, first.new_tensor([count])])
    return Packing(
        tokens=None if count == batch * length else tokens,
        positions=numbers,
        starts=bounds.int(),
        longest=int(bounds.diff().max()),
    )


def _check(positions: Tensor, expected: Tensor) -> None:
    if torch.equal(positions, expected):
        return
    place = int((positions != expected).nonzero()[0])
    raise ValueError(
        f"whorl.exact: token {place} has position {int(positions[place])}, expected {int(expected[place])}: positions "
        f"run from 0 upwards in each sequence, as in the engine. Pass position_ids that do, or none"
    )
