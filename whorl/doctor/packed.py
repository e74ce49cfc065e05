"""The checklist's case on packed sequences (THD) and context parallelism.

A token must rotate in a pack, and on a context-parallel rank, as it does in its sequence alone.
"""

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

from whorl.doctor.live_model import check_sliced_once
from whorl.doctor.rotation import Call, compute_angles, half_width, rotary_style, rotate
from whorl.doctor.subject import Answer, Subject

if TYPE_CHECKING:
    from torch import Tensor


def packed_and_context_parallel(subject: Subject) -> Answer:
    """Compare packed sequences, and the slices of two context-parallel ranks, with sequences one by one."""
    import torch

    packed = subject.record.rotary[0].get("packed_seq_params") if subject.record.rotary else None
    if findings := list(check_sliced_once(subject.owner, packed)):
        return "fail", f"{findings[0].found}, expected {findings[0].expected}"
    lengths = (4, 8)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    if subject.is_mrope:
        positions = torch.stack((positions, positions // 2, positions // 3))
    pack_angles = compute_angles(subject.owner, positions)
    if difference := _describe_different_angles(subject, positions, pack_angles, lengths):
        return "fail", difference
    rotating = next((call for call in subject.calls if call.takes_angles), None)
    if rotating is None:
        return "pass", "tokens get the same angles in a pack and in context-parallel slices as alone"
    return _check_packed_rotation(subject, rotating, pack_angles, lengths)


def _describe_different_angles(
    subject: Subject, positions: "Tensor", pack_angles: "Tensor", lengths: tuple[int, ...]
) -> str | None:
    """Say which tokens get other angles in a pack, or on a context-parallel rank, than alone; None if none do."""
    import torch

    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        alone = compute_angles(subject.owner, positions[..., start : start + length])
        if not torch.allclose(alone, pack_angles[:, start : start + length], atol=1e-5):
            return f"a sequence of {length} tokens gets other angles in a pack than alone"
    tokens = slice(starts[-1], None)
    for rank in range(2):
        rank_tokens = _context_parallel_tokens(lengths[-1], rank, 2)
        rank_angles = compute_angles(subject.owner, positions[..., tokens][..., rank_tokens])
        if not torch.allclose(rank_angles, pack_angles[:, tokens][:, rank_tokens], atol=1e-5):
            return f"context-parallel rank {rank} of 2 gets other angles than the whole sequence"
    return None


def _context_parallel_tokens(length: int, rank: int, size: int) -> list[int]:
    """Return the token indices of a context-parallel rank: one part from the front, its mirror from the back."""
    part = length // (2 * size)
    back = 2 * size - 1 - rank
    return [*range(rank * part, (rank + 1) * part), *range(back * part, (back + 1) * part)]


def _check_packed_rotation(subject: Subject, call: Call, pack_angles: "Tensor", lengths: tuple[int, ...]) -> Answer:
    """Compare the rotation of a pack (THD), whole and on each of two context-parallel ranks, with plain torch."""
    import torch

    style, heads = rotary_style(subject.owner), call.arguments["t"].shape[-2:]
    t = torch.randn(sum(lengths), *heads, generator=torch.Generator().manual_seed(0)).to(pack_angles.device)
    bounds = [0, *(sum(lengths[: index + 1]) for index in range(len(lengths)))]
    # MRoPE angles have a row per packed token. Plain RoPE has one table of positions 0, 1, ... for all sequences: the
    # rows of the last sequence, which is the longest.
    freqs = pack_angles[0][:, None, None] if subject.is_mrope else pack_angles[0][bounds[-2] :][:, None, None]
    scale = call.arguments.get("mscale", 1.0)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=pack_angles.device)
    expected = rotate_by_sequence(t, freqs, bounds, style, scale)
    accepts_group = "cp_group" in call.arguments
    for size in (1, 2) if accepts_group else (1,):
        for rank in range(size):
            tokens = [
                start + token
                for start, length in zip(bounds, lengths, strict=False)
                for token in (_context_parallel_tokens(length, rank, size) if size > 1 else range(length))
            ]
            group = SimpleNamespace(size=lambda size=size: size, rank=lambda rank=rank: rank)
            options = {"cp_group": group} if accepts_group else {}
            out = call.repeat(t=t[tokens], freqs=freqs, cu_seqlens=cu_seqlens, **options)
            if out.shape != expected[tokens].shape or not torch.allclose(out, expected[tokens], atol=1e-4):
                where = f"context-parallel rank {rank} of {size}" if size > 1 else "the pack"
                return "fail", f"THD: {where} is not rotated as its sequences are one by one"
    return "pass", f"THD of lengths {list(lengths)}" + (
        ", whole and on 2 context-parallel ranks" if accepts_group else ""
    )


def rotate_by_sequence(t: "Tensor", freqs: "Tensor", bounds: list[int], style: str, scale: float = 1.0) -> "Tensor":
    """Rotate each sequence of a pack by itself in plain torch.

    A sequence uses its own rows of freqs where freqs has a row per packed token, else the first rows.
    """
    import torch

    parts = []
    for start, end in itertools.pairwise(bounds):
        rows = freqs[start:end] if freqs.shape[0] == bounds[-1] else freqs[: end - start]
        angles = half_width(rows.float(), style).squeeze(1)
        parts.append(rotate(t[start:end], angles.cos() * scale, angles.sin() * scale, style))
    return torch.cat(parts)
