"""Packed sequences, [T, ...] with the offset at which each begins, for code that takes one sequence at a time."""

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
from torch import Tensor

from .._draw import Draw
from .._op import Values
from .._tracing import is_readable
from ..sparse_attention.bits import causal_bits

Gradients = tuple[Tensor, Tensor, Tensor]
Starts = Annotated[Tensor, "[B + 1] int32"]  # sequence b is tokens starts[b] to starts[b + 1] (exclusive)
MOST_CHANNELS = 256  # of a head, in one program of the Triton kernels


def check_starts(name: str, q: Tensor, starts: Tensor, **_: object) -> None:
    """Raise ValueError unless starts describe sequences of q's tokens, if `is_readable`."""
    if is_readable(starts):
        sequences(name, starts.tolist(), len(q))


def head_reason(q: Tensor, **_: object) -> str | None:
    """Return None, or the reason that the Triton kernels cannot take heads of q's size."""
    size = q.shape[2]
    return None if size <= MOST_CHANNELS else f"a head of {size} channels does not fit one program ({MOST_CHANNELS})"


def read(starts: Tensor, num_tokens: int) -> list[int]:
    """Copy starts to the host, which waits for the device. A meta tensor is read as one sequence of all tokens."""
    return [0, num_tokens] if starts.is_meta else starts.tolist()


def sequences(name: str, starts: list[int], num_tokens: int) -> Iterator[slice]:
    """Return an iterator over the slice of tokens of each sequence that is not empty.

    Raises ValueError unless starts begin at 0, do not decrease and do not exceed the number of tokens.
    """
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
        raise ValueError(
            f"{name}: starts are {starts}, expected 0 first, none below the one before, and {num_tokens} tokens at most"
        )
    return (slice(first, end) for first, end in itertools.pairwise(starts) if end > first)


def special_inputs(draw: Draw, lengths: tuple[int, ...], dim: int, idle: int = 0) -> Values:
    """Return what is special of a case of packed sequences; idle: tokens past the last one."""
    return {"T": sum(lengths) + idle, "q": draw.normal, "starts": draw.offsets(lengths), "scale": dim**-0.5}


def backward_by_sequence(
    backward: Callable[..., Gradients],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    window: int,
) -> Gradients:
    """Call `backward`, an implementation of `masked_attention_backward`, for each sequence; return dq, dk and dv.

    The arguments are those of `causal_attention_backward`, with starts on the host. Tokens past the last start get
    zeros.
    """
    grads, end = [], 0
    for part in sequences("causal_attention_backward", starts, len(q)):
        count = part.stop - part.start
        bits = causal_bits(count, count, q.device, window) if 0 < window < count else None
        tensors = {"dout": dout[part], "q": q[part], "k": k[part], "v": v[part], "out": out[part], "lse": lse[part]}
        grads.append(backward(**tensors, bits=bits, dlse=None if dlse is None else dlse[part], scale=scale))
        end = part.stop
    if end == len(q) and len(grads) == 1:
        return grads[0]
    padding = [torch.zeros_like(x[end:], memory_format=torch.contiguous_format) for x in (q, k, v)]
    dq, dk, dv = (torch.cat(parts) for parts in zip(*grads, padding, strict=True))
    return dq, dk, dv
