"""Token positions: text, multimodal (time, height, width), packed sequences and zig-zag context-parallel slices.

Everything is computed on the host with numpy, without a loop over tokens: positions belong to the data loader, and an
accelerator tensor given here is copied back once. A function answers in the kind (numpy or torch) it was asked in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Array = TypeVar("Array", torch.Tensor, np.ndarray)
Ints = NDArray[np.int64]
ArrayLike = torch.Tensor | np.ndarray | Sequence[Any]

TEXT, IMAGE, VIDEO = 0, 1, 2

# HF model types by rule. Transformers' `get_rope_index` is the same code within a group.
_WHOLE_VIDEO = ("qwen2_vl",)
_SECONDS = ("qwen2_5_vl",)
_PER_FRAME = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PER_FRAME_GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
MODEL_TYPES = _WHOLE_VIDEO + _SECONDS + _PER_FRAME + _PER_FRAME_GLM


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRule:
    """How a model family numbers its vision tokens; `from_hf` reads it from a configuration.

    spatial_merge_size: patches per token along height and width.
    split_frames: each video frame is a block of its own (timestamps are text tokens between frames).
    tokens_per_second: time positions per second of video; None: one per temporal patch.
    whole_seconds: cut seconds per grid to an integer first, as some transformers 5 releases do (5.17 does, 5.22 does
        not): at half a second a grid every frame is then at one time. Otherwise each position is rounded down.
    The token ids are needed only where token types are not given. Families whose video frames carry the image token
    between two markers (GLM-4V) set video_start_id and video_end_id.
    """

    spatial_merge_size: int = 2
    split_frames: bool = False
    tokens_per_second: float | None = None
    whole_seconds: bool = False
    image_token_id: int | None = None
    video_token_id: int | None = None
    video_start_id: int | None = None
    video_end_id: int | None = None

    def __post_init__(self) -> None:
        if self.spatial_merge_size < 1:
            raise ValueError(f"PositionRule: spatial_merge_size is {self.spatial_merge_size}, it must be at least 1.")
        if self.tokens_per_second is not None and self.split_frames:
            raise ValueError("PositionRule: tokens_per_second has no meaning with split_frames (time is in the text).")
        if (self.video_start_id is None) != (self.video_end_id is None):
            raise ValueError("PositionRule: video_start_id and video_end_id go together; one of them is missing.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | object) -> "PositionRule":
        """The rule of an HF configuration (object or dict) whose model_type is one of MODEL_TYPES."""
        model_type = _field(config, "model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"PositionRule: model_type {model_type!r} is not known. Known: {', '.join(MODEL_TYPES)}.")
        vision = _field(config, "vision_config")
        merge = _field(vision, "spatial_merge_size")
        if merge is None:
            raise ValueError(f"PositionRule: the {model_type} configuration has no vision_config.spatial_merge_size.")
        seconds = _field(vision, "tokens_per_second") if model_type in _SECONDS else None
        if model_type in _SECONDS and seconds is None:
            raise ValueError(f"PositionRule: the {model_type} configuration has no vision_config.tokens_per_second.")
        marked = model_type in _PER_FRAME_GLM
        return cls(
            spatial_merge_size=merge,
            split_frames=model_type in _PER_FRAME + _PER_FRAME_GLM,
            tokens_per_second=seconds,
            image_token_id=_field(config, "image_token_id"),
            video_token_id=None if marked else _field(config, "video_token_id"),
            video_start_id=_field(config, "video_start_token_id") if marked else None,
            video_end_id=_field(config, "video_end_token_id") if marked else None,
        )


def token_types(input_ids: Array, rule: PositionRule) -> Array:
    """0 text, 1 image, 2 video for every token of input_ids [..., S], from the rule's token ids."""
    ids = _array(input_ids, "input_ids")
    if rule.image_token_id is None or (rule.video_token_id is None and rule.video_start_id is None):
        raise ValueError("token_types: the rule has no image and video token ids; give token_types yourself.")
    image = ids == rule.image_token_id
    if rule.video_start_id is None:
        video = ids == rule.video_token_id
    else:
        depth = np.cumsum((ids == rule.video_start_id).astype(np.int64) - (ids == rule.video_end_id), axis=-1)
        if ids.shape[-1] and bool((depth[..., -1] != 0).any()):
            raise ValueError("token_types: a sequence opens a video it does not close; it was cut inside a video.")
        video = image & (depth > 0)
    return _like(np.where(video, VIDEO, np.where(image, IMAGE, TEXT)), input_ids)


def multimodal_positions(
    input_ids: Array,
    rule: PositionRule,
    *,
    image_grid_thw: ArrayLike | None = None,
    video_grid_thw: ArrayLike | None = None,
    seconds_per_grid: ArrayLike | None = None,
    mm_token_type_ids: ArrayLike | None = None,
    attention_mask: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Positions and deltas of sequences that mix text, images and videos.

    Padded: input_ids [B, S] gives positions [3, B, S]; tokens masked by attention_mask get 0.
    Packed: input_ids [T] with cu_seqlens [B + 1] gives positions [3, T]; each sequence starts at 0.
    Grids [N, 3] are (time, height, width) in patches, in the order of their tokens. Deltas [B, 1] are what
    `decode_positions` adds to a token's index. Both are int64.
    """
    ids = _array(input_ids, "input_ids")
    types = _array(token_types(ids, rule) if mm_token_type_ids is None else mm_token_type_ids, "mm_token_type_ids")
    if types.shape != ids.shape:
        raise ValueError(f"multimodal_positions: mm_token_type_ids is {types.shape}, input_ids is {ids.shape}.")
    if types.size and (types.min() < TEXT or types.max() > VIDEO):
        raise ValueError(f"multimodal_positions: token types are 0, 1 or 2, found {sorted(set(np.unique(types)))}.")
    keep, starts = _layout(ids, attention_mask, cu_seqlens)
    kept = types[keep] if keep is not None else types.reshape(-1)
    blocks = (
        _Blocks.of("image", IMAGE, kept, _grids("image_grid_thw", image_grid_thw, rule), None, rule),
        _Blocks.of("video", VIDEO, kept, _grids("video_grid_thw", video_grid_thw, rule), seconds_per_grid, rule),
    )
    flat = _number(kept, starts, blocks)
    deltas = _deltas(flat, starts)
    shape: tuple[int, ...] = (3,) + ids.shape
    if keep is None:
        positions = flat.reshape(shape)
    else:
        positions = np.zeros(shape, np.int64)
        positions[:, keep] = flat
    return _like(positions, input_ids), _like(deltas, input_ids)


def decode_positions(lengths: Array, deltas: ArrayLike, count: int = 1) -> Array:
    """Positions [3, B, count] of the next `count` text tokens after `lengths` [B] real (unpadded) tokens each."""
    start = _array(lengths, "lengths")
    shift = _array(deltas, "deltas")
    if start.ndim != 1 or shift.shape != (start.size, 1):
        raise ValueError(
            f"decode_positions: lengths [B] and deltas [B, 1] expected, found {start.shape}, {shift.shape}."
        )
    if count < 1:
        raise ValueError(f"decode_positions: count is {count}, it must be at least 1.")
    next_tokens = start[:, None] + shift + np.arange(count)  # [B, count]
    return _like(np.stack((next_tokens,) * 3), lengths)


def packed_positions(cu_seqlens: Array) -> Array:
    """Text positions [T] of packed sequences: each counts from 0."""
    bounds = _bounds(cu_seqlens)
    return _like(np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds)), cu_seqlens)


def context_indices(cu_seqlens: Array, rank: int, size: int) -> Array:
    """Which packed tokens rank `rank` of `size` holds: of each sequence the chunks rank and 2 * size - 1 - rank.

    One unpacked sequence of S tokens is cu_seqlens = [0, S]. Every length must be a multiple of 2 * size; one rank
    alone holds everything. The rank's own cu_seqlens are cu_seqlens // size.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"context_indices: rank {rank} of {size} does not exist.")
    bounds = _bounds(cu_seqlens)
    if size == 1:
        return _like(np.arange(bounds[-1]), cu_seqlens)
    lengths = np.diff(bounds)
    bad = np.flatnonzero(lengths % (2 * size))
    if bad.size:
        raise ValueError(
            f"context_indices: sequence {bad[0]} has {lengths[bad[0]]} tokens, not a multiple of 2 * {size} ranks. "
            f"Pad each sequence to a multiple of {2 * size}."
        )
    chunk = lengths // (2 * size)
    firsts = np.stack((bounds[:-1] + rank * chunk, bounds[:-1] + (2 * size - 1 - rank) * chunk), axis=1)
    return _like(_ranges(firsts.reshape(-1), np.repeat(chunk, 2)), cu_seqlens)


def context_slice(x: Array, rank: int, size: int, *, dim: int, cu_seqlens: ArrayLike | None = None) -> Array:
    """The part of x that context-parallel rank `rank` holds along its token dimension `dim`; differentiable."""
    bounds = _token_bounds("context_slice", x.shape[dim], cu_seqlens)
    return _take(x, context_indices(bounds, rank, size), dim)


def context_join(parts: Sequence[Array], *, dim: int, cu_seqlens: ArrayLike | None = None) -> Array:
    """Inverse of `context_slice`: the parts of ranks 0, 1, ... put back in token order."""
    size = len(parts)
    bounds = _token_bounds("context_join", sum(part.shape[dim] for part in parts), cu_seqlens)
    order = np.concatenate([context_indices(bounds, rank, size) for rank in range(size)])
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    whole: Any = torch.cat(list(parts), dim) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts, dim)
    return _take(whole, inverse, dim)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Vision blocks of one modality: their tokens, and per block its grid in tokens and the seconds of a patch."""

    name: str
    tokens: Ints  # [N] indices into the kept tokens
    grid: Ints  # [blocks, 3]
    seconds: NDArray[np.float32]  # [blocks]
    rate: np.float32  # time positions per second

    @classmethod
    def of(
        cls, name: str, modality: int, types: Ints, grid: Ints, seconds: ArrayLike | None, rule: PositionRule
    ) -> "_Blocks":
        tokens = np.flatnonzero(types == modality)
        if modality == VIDEO and rule.split_frames:
            grid = np.repeat(grid, grid[:, 0], axis=0)
            grid[:, 0] = 1
        wanted = int(grid.prod(axis=1).sum())
        if wanted != tokens.size:
            raise ValueError(
                f"multimodal_positions: {tokens.size} {name} placeholder tokens, but {name}_grid_thw "
                f"({len(grid)} blocks) calls for {wanted}. Is the prompt cut short, or are grids missing or extra?"
            )
        rate = 1.0 if modality == IMAGE or rule.tokens_per_second is None else rule.tokens_per_second
        return cls(name, tokens, grid, _seconds(len(grid), seconds, rule), np.float32(rate))


def _seconds(count: int, seconds: ArrayLike | None, rule: PositionRule) -> NDArray[np.float32]:
    if seconds is None:
        return np.ones(count, np.float32)
    if rule.tokens_per_second is None:
        raise ValueError("multimodal_positions: seconds_per_grid was given, but the rule has no tokens_per_second.")
    values = np.asarray(_host(seconds), np.float32)
    if values.shape != (count,):
        raise ValueError(f"multimodal_positions: seconds_per_grid is {values.shape}, there are {count} videos.")
    if not bool((np.isfinite(values) & (values >= 0)).all()):
        raise ValueError(f"multimodal_positions: seconds_per_grid must be finite and not negative, found {values}.")
    return np.trunc(values) if rule.whole_seconds else values


def _number(types: Ints, starts: Ints, blocks: tuple[_Blocks, ...]) -> Ints:
    """Positions [3, N] of kept tokens whose sequences begin at `starts` [B + 1]."""
    # A text token moves the position on by one, a block's first token by the longer side of its grid.
    advance = (types == TEXT).astype(np.int64)
    firsts = []
    for block in blocks:
        sizes = block.grid.prod(axis=1)
        ends = np.cumsum(sizes)
        first = block.tokens[ends - sizes]
        _check_contiguous(block, first, block.tokens[ends - 1], sizes, starts)
        advance[first] = block.grid[:, 1:].max(axis=1, initial=0)
        firsts.append((first, sizes))
    before = np.cumsum(advance) - advance
    sequence_start = np.append(before, 0)[starts[:-1]]  # the appended 0 serves empty sequences at the end
    before -= np.repeat(sequence_start, np.diff(starts))
    positions = np.broadcast_to(before, (3, before.size)).copy()
    for block, (first, sizes) in zip(blocks, firsts, strict=True):
        if len(sizes):
            positions[:, block.tokens] = _block_positions(block, before[first], sizes)
    return positions


def _block_positions(block: _Blocks, start: Ints, sizes: Ints) -> Ints:
    index = _ranges(np.zeros_like(sizes), sizes)
    which = np.repeat(np.arange(len(sizes)), sizes)
    width = block.grid[which, 2]
    plane = block.grid[which, 1] * width
    frame = index // plane
    in_frame = index - frame * plane
    row = in_frame // width
    # The precision and order of transformers, which decide where a product falls just below an integer.
    time = (frame.astype(np.float32) * (block.rate * block.seconds)[which]).astype(np.int64)
    return np.stack((time, row, in_frame - row * width)) + start[which]


def _check_contiguous(block: _Blocks, first: Ints, last: Ints, sizes: Ints, starts: Ints) -> None:
    broken = last - first + 1 != sizes
    broken |= np.searchsorted(starts, first, "right") != np.searchsorted(starts, last, "right")
    if bool(broken.any()):
        which = int(np.flatnonzero(broken)[0])
        raise ValueError(
            f"multimodal_positions: {block.name} block {which} of {len(sizes)} has grid {block.grid[which].tolist()} "
            f"(merged), {sizes[which]} tokens, but its placeholder tokens are not one run of that length. "
            "Are the grids in the order of the tokens?"
        )


def _deltas(positions: Ints, starts: Ints) -> Ints:
    """Largest position + 1 - length, per sequence [B, 1]; 0 for an empty sequence."""
    lengths = np.diff(starts)
    highest = np.full(lengths.size, -1)
    filled = lengths > 0
    if bool(filled.any()):
        highest[filled] = np.maximum.reduceat(positions.max(axis=0), starts[:-1][filled])
    return (highest + 1 - lengths)[:, None]


def _layout(
    ids: Ints, attention_mask: ArrayLike | None, cu_seqlens: ArrayLike | None
) -> tuple[NDArray[np.bool_] | None, Ints]:
    """Which tokens count (None: all) and where each sequence begins among them."""
    if cu_seqlens is not None:
        if ids.ndim != 1 or attention_mask is not None:
            raise ValueError("multimodal_positions: packed input is input_ids [T] with cu_seqlens and no mask.")
        return None, _token_bounds("multimodal_positions", ids.size, cu_seqlens)
    if ids.ndim != 2:
        raise ValueError(
            f"multimodal_positions: input_ids [B, S] expected (or [T] with cu_seqlens), found {ids.shape}."
        )
    if attention_mask is None:
        return None, np.arange(ids.shape[0] + 1) * ids.shape[1]
    keep = _array(attention_mask, "attention_mask") != 0
    if keep.shape != ids.shape:
        raise ValueError(f"multimodal_positions: attention_mask is {keep.shape}, input_ids is {ids.shape}.")
    return keep, np.concatenate(([0], np.cumsum(keep.sum(axis=1))))


def _grids(name: str, grid: ArrayLike | None, rule: PositionRule) -> Ints:
    """Grids in tokens, i.e. height and width divided by the merge size."""
    if grid is None:
        return np.zeros((0, 3), np.int64)
    patches = _array(grid, name)
    merge = rule.spatial_merge_size
    if patches.ndim != 2 or patches.shape[1] != 3:
        raise ValueError(f"multimodal_positions: {name} is {patches.shape}, [N, 3] expected.")
    bad = (patches < 1).any(axis=1) | (patches[:, 1:] % merge != 0).any(axis=1)
    if bool(bad.any()):
        found = patches[np.flatnonzero(bad)[0]].tolist()
        raise ValueError(f"multimodal_positions: {name} has {found}; height and width must be multiples of {merge}.")
    return patches // np.array([1, merge, merge])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - (ends - lengths), lengths)


def _bounds(cu_seqlens: ArrayLike) -> Ints:
    bounds = _array(cu_seqlens, "cu_seqlens")
    if bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0 or bool((np.diff(bounds) < 0).any()):
        raise ValueError(f"cu_seqlens must be [B + 1], start at 0 and never fall; found {bounds.tolist()}.")
    return bounds


def _token_bounds(name: str, num_tokens: int, cu_seqlens: ArrayLike | None) -> Ints:
    bounds = np.array([0, num_tokens]) if cu_seqlens is None else _bounds(cu_seqlens)
    if bounds[-1] != num_tokens:
        raise ValueError(f"{name}: cu_seqlens ends at {bounds[-1]}, there are {num_tokens} tokens.")
    return bounds


def _take(x: Array, index: Ints, dim: int) -> Array:
    if isinstance(x, torch.Tensor):
        return x.index_select(dim, torch.from_numpy(index).to(x.device))
    return np.take(x, index, axis=dim)


def _host(x: ArrayLike) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def _array(x: ArrayLike, name: str) -> Ints:
    array = _host(x)
    if array.dtype.kind not in "iub" and array.size:
        raise ValueError(f"{name}: integers expected, found {array.dtype}.")
    return array.astype(np.int64, copy=False)


def _like(array: np.ndarray, x: Array) -> Array:
    if isinstance(x, torch.Tensor):
        return torch.from_numpy(array).to(x.device)
    return array


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
