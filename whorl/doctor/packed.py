"""Packed sequences (THD) and context-parallel slices of a live model, against its sequences one by one."""

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

from whorl.doctor.live_model import packed_twice
from whorl.doctor.rotation import Call, angles_of, half_width, style_of, turned
from whorl.doctor.subject import Answer, Subject

if TYPE_CHECKING:
    from torch import Tensor


def packed_and_sliced(subject: Subject) -> Answer:
    import torch

    packed = subject.seen.rotary[0].get("packed_seq_params") if subject.seen.rotary else None
    if findings := list(packed_twice(subject.live, packed)):
        return "fail", f"{findings[0].found}, expected {findings[0].expected}"
    lengths = (4, 8)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    if subject.is_mrope:
        positions = torch.stack((positions, positions // 2, positions // 3))
    whole = angles_of(subject.live, positions)
    if wrong := _rows_that_differ(subject, positions, whole, lengths):
        return "fail", wrong
    rotating = next((call for call in subject.calls if call.takes_angles), None)
    if rotating is None:
        return "pass", "rows of packed sequences and of context-parallel slices are those of the tokens alone"
    return _packed_rotation(subject, rotating, whole, lengths)


def _rows_that_differ(subject: Subject, positions: "Tensor", whole: "Tensor", lengths: tuple[int, ...]) -> str | None:
    """Whether tokens get other rows in a pack, or on a context-parallel rank, than they get by themselves."""
    import torch

    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        alone = angles_of(subject.live, positions[..., start : start + length])
        if not torch.allclose(alone, whole[:, start : start + length], atol=1e-5):
            return f"a sequence of {length} tokens gets other rows in a pack than alone"
    tokens = slice(starts[-1], None)
    for rank in range(2):
        mine = _slices(lengths[-1], rank, 2)
        part = angles_of(subject.live, positions[..., tokens][..., mine])
        if not torch.allclose(part, whole[:, tokens][:, mine], atol=1e-5):
            return f"context-parallel rank {rank} of 2 gets other rows than the whole sequence"
    return None


def _slices(length: int, rank: int, size: int) -> list[int]:
    """The tokens of a context-parallel rank: one chunk from the front, its mirror from the back."""
    chunk = length // (2 * size)
    back = 2 * size - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(back * chunk, (back + 1) * chunk)]


def _packed_rotation(subject: Subject, call: Call, whole: "Tensor", lengths: tuple[int, ...]) -> Answer:
    """The live rotation of a pack (THD), whole and as each of two context-parallel ranks has it."""
    import torch

    style, heads = style_of(subject.live), call.given["t"].shape[-2:]
    t = torch.randn(sum(lengths), *heads, generator=torch.Generator().manual_seed(0)).to(whole.device)
    bounds = [0, *(sum(lengths[: index + 1]) for index in range(len(lengths)))]
    freqs = whole[0][:, None, None] if subject.is_mrope else whole[0][bounds[-2] :][:, None, None]
    scale = call.given.get("mscale", 1.0)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=whole.device)
    wanted = by_sequences(t, freqs, bounds, style, scale)
    accepts_group = "cp_group" in call.given
    for size in (1, 2) if accepts_group else (1,):
        for rank in range(size):
            rows = [
                start + row
                for start, length in zip(bounds, lengths, strict=False)
                for row in (_slices(length, rank, size) if size > 1 else range(length))
            ]
            group = SimpleNamespace(size=lambda size=size: size, rank=lambda rank=rank: rank)
            more = {"cp_group": group} if accepts_group else {}
            out = call.again(t=t[rows], freqs=freqs, cu_seqlens=cu_seqlens, **more)
            if out.shape != wanted[rows].shape or not torch.allclose(out, wanted[rows], atol=1e-4):
                where = f"context-parallel rank {rank} of {size}" if size > 1 else "the pack"
                return "fail", f"THD: {where} is not rotated as its sequences are one by one"
    return "pass", f"THD of lengths {list(lengths)}" + (
        ", whole and on 2 context-parallel ranks" if accepts_group else ""
    )


def by_sequences(t: "Tensor", freqs: "Tensor", bounds: list[int], style: str, scale: float = 1.0) -> "Tensor":
    """Each sequence of a pack by itself: its own rows where there are as many as tokens, else the first ones."""
    import torch

    parts = []
    for start, end in itertools.pairwise(bounds):
        mine = freqs[start:end] if freqs.shape[0] == bounds[-1] else freqs[: end - start]
        angles = half_width(mine.float(), style).squeeze(1)
        parts.append(turned(t[start:end], angles.cos() * scale, angles.sin() * scale, style))
    return torch.cat(parts)
