"""Token positions: text, multimodal (time, height, width), packed sequences and zig-zag context-parallel slices.

Everything is computed on the host with numpy, without a loop over tokens: positions are the data loader's work, and a
tensor on an accelerator is copied to the host once. Every function returns the kind of array (numpy or torch) that it
was called with.
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

# Hugging Face model types by rule. Within a group, `get_rope_index` of transformers is the same code.
_WHOLE_VIDEO = ("qwen2_vl",)
_SECONDS = ("qwen2_5_vl",)
_PER_FRAME = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PER_FRAME_GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
MODEL_TYPES = _WHOLE_VIDEO + _SECONDS + _PER_FRAME + _PER_FRAME_GLM


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRule:
    """How a model family numbers its vision tokens; `from_hf` reads the rule from a configuration.

    spatial_merge_size: patches per token along height and width.
    split_frames: each video frame is a block of its own (timestamps are text tokens between frames).
    tokens_per_second: time positions per second of video; None: one per temporal patch.
    whole_seconds: truncate seconds per grid to an integer first, as some transformers 5 releases do (5.17 does, 5.22
        does not): at half a second per grid all frames then have one time. Otherwise each position is rounded down.
    past_time: after a video, text goes on past the largest position of the video, time included. So do Qwen's own code,
        transformers 4 and vLLM; transformers 5 goes on past the longer side of a frame, so that text may have the
        positions of frames.
    The token ids are needed only where token types are not passed. Families whose video frames use the image token
    between two markers (GLM-4V) set video_start_id and video_end_id.
    Raises ValueError when the fields contradict each other.
    """

    spatial_merge_size: int = 2
    split_frames: bool = False
    tokens_per_second: float | None = None
    whole_seconds: bool = False
    past_time: bool = False
    image_token_id: int | None = None
    video_token_id: int | None = None
    video_start_id: int | None = None
    video_end_id: int | None = None

    def __post_init__(self) -> None:
        if self.spatial_merge_size < 1:
            raise ValueError(f"PositionRule: spatial_merge_size is {self.spatial_merge_size}, expected at least 1")
        if self.tokens_per_second is not None and self.split_frames:
            raise ValueError("PositionRule: tokens_per_second has no meaning with split_frames (time is in the text).")
        if (self.video_start_id is None) != (self.video_end_id is None):
            raise ValueError("PositionRule: one of video_start_id and video_end_id is missing; give both or neither")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | object) -> "PositionRule":
        """Return the rule of a Hugging Face configuration (object or dict) whose model_type is in MODEL_TYPES.

        Raises ValueError for another model_type or a missing field. Example:
        `PositionRule.from_hf(json.load(open("config.json")))`.
        """
        model_type = _field(config, "model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"PositionRule: model_type is {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
        vision = _field(config, "vision_config")
        merge = _field(vision, "spatial_merge_size")
        if merge is None:
            raise ValueError(f"PositionRule: the {model_type} configuration has no vision_config.spatial_merge_size.")
        seconds = _field(vision, "tokens_per_second") if model_type in _SECONDS else None
        if model_type in _SECONDS and seconds is None:
            raise ValueError(f"PositionRule: the {model_type} configuration has no vision_config.tokens_per_second.")
        has_markers = model_type in _PER_FRAME_GLM
        return cls(
            spatial_merge_size=merge,
            split_frames=model_type in _PER_FRAME + _PER_FRAME_GLM,
            tokens_per_second=seconds,
            image_token_id=_field(config, "image_token_id"),
            video_token_id=None if has_markers else _field(config, "video_token_id"),
            video_start_id=_field(config, "video_start_token_id") if has_markers else None,
            video_end_id=_field(config, "video_end_token_id") if has_markers else None,
        )


def token_types(input_ids: Array, rule: PositionRule) -> Array:
    """Return the type of every token of input_ids [..., S] (0 text, 1 image, 2 video), by the rule's token ids.

    Raises ValueError when the rule has no token ids, or a sequence opens a video that it does not close.
    """
    ids = _array(input_ids, "input_ids")
    if rule.image_token_id is None or (rule.video_token_id is None and rule.video_start_id is None):
        raise ValueError("token_types: the rule has no image and video token ids; pass mm_token_type_ids instead")
    image = ids == rule.image_token_id
    if rule.video_start_id is None:
        video = ids == rule.video_token_id
    else:
        depth = np.cumsum((ids == rule.video_start_id).astype(np.int64) - (ids == rule.video_end_id), axis=-1)
        if ids.shape[-1] and bool((depth[..., -1] != 0).any()):
            raise ValueError("token_types: a sequence opens a video that it does not close; is it truncated?")
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
    """Return positions and deltas of sequences that mix text, images and videos.

    Padded: input_ids [B, S] gives positions [3, B, S]; tokens masked by attention_mask get 0.
    Packed: input_ids [T] with cu_seqlens [B + 1] gives positions [3, T]; each sequence starts at 0.
    Grids [N, 3] are (time, height, width) in patches, in the order of their tokens; seconds_per_grid [N] belongs to the
    video grids. mm_token_type_ids are like input_ids; without them `token_types` finds the types. Deltas [B, 1] are
    what `decode_positions` adds to a token's index. Both results are int64. Raises ValueError when grids and
    placeholder tokens do not agree, or shapes do not fit.

        positions, deltas = multimodal_positions(input_ids, rule, image_grid_thw=grids, attention_mask=mask)
    """
    ids = _array(input_ids, "input_ids")
    types = _array(token_types(ids, rule) if mm_token_type_ids is None else mm_token_type_ids, "mm_token_type_ids")
    if types.shape != ids.shape:
        raise ValueError(f"multimodal_positions: mm_token_type_ids is {types.shape}, expected {ids.shape} as input_ids")
    if types.size and (types.min() < TEXT or types.max() > VIDEO):
        unique = sorted(set(np.unique(types)))
        raise ValueError(f"multimodal_positions: mm_token_type_ids has values {unique}, expected 0, 1 and 2 only")
    is_real, starts = _real_tokens(ids, attention_mask, cu_seqlens)
    real_types = types[is_real] if is_real is not None else types.reshape(-1)
    video_grids = _token_grids("video_grid_thw", video_grid_thw, rule)
    blocks = (
        _Blocks.build("image", IMAGE, real_types, _token_grids("image_grid_thw", image_grid_thw, rule), None, rule),
        _Blocks.build("video", VIDEO, real_types, video_grids, seconds_per_grid, rule),
    )
    flat = _number_tokens(real_types, starts, blocks)
    deltas = _deltas(flat, starts)
    shape: tuple[int, ...] = (3,) + ids.shape
    if is_real is None:
        positions = flat.reshape(shape)
    else:
        positions = np.zeros(shape, np.int64)
        positions[:, is_real] = flat
    return _like(positions, input_ids), _like(deltas, input_ids)


def decode_positions(lengths: Array, deltas: ArrayLike, count: int = 1) -> Array:
    """Return the positions [3, B, count] of the next `count` text tokens of each sequence.

    lengths: [B], real (unpadded) tokens of each sequence; deltas: [B, 1], from `multimodal_positions`. Raises
    ValueError when shapes do not fit or count is below 1.
    """
    start = _array(lengths, "lengths")
    shift = _array(deltas, "deltas")
    if start.ndim != 1 or shift.shape != (start.size, 1):
        raise ValueError(
            f"decode_positions: lengths is {start.shape} and deltas {shift.shape}, expected [B] and [B, 1]"
        )
    if count < 1:
        raise ValueError(f"decode_positions: count is {count}, expected at least 1")
    next_tokens = start[:, None] + shift + np.arange(count)  # [B, count]
    return _like(np.stack((next_tokens,) * 3), lengths)


def packed_positions(cu_seqlens: Array) -> Array:
    """Return the text positions [T] of packed sequences, each of which counts from 0. cu_seqlens: [B + 1]."""
    bounds = _bounds(cu_seqlens)
    return _like(np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds)), cu_seqlens)


def context_indices(cu_seqlens: Array, rank: int, size: int) -> Array:
    """Return the indices of the packed tokens of context-parallel rank `rank` of `size`, in zig-zag order.

    The rank has chunks rank and 2 * size - 1 - rank of each sequence. One unpacked sequence of S tokens is
    cu_seqlens = [0, S]. With size 1 the rank has all tokens; otherwise every length must be a multiple of 2 * size, or
    ValueError is raised. The cu_seqlens of the rank's tokens are cu_seqlens // size.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"context_indices: rank is {rank} of {size} ranks, expected 0 to {size - 1}")
    bounds = _bounds(cu_seqlens)
    if size == 1:
        return _like(np.arange(bounds[-1]), cu_seqlens)
    lengths = np.diff(bounds)
    bad = np.flatnonzero(lengths % (2 * size))
    if bad.size:
        raise ValueError(
            f"context_indices: sequence {bad[0]} has {lengths[bad[0]]} tokens, not a multiple of 2 * {size} ranks; "
            f"pad each sequence to a multiple of {2 * size}"
        )
    chunk = lengths // (2 * size)
    firsts = np.stack((bounds[:-1] + rank * chunk, bounds[:-1] + (2 * size - 1 - rank) * chunk), axis=1)
    return _like(_ranges(firsts.reshape(-1), np.repeat(chunk, 2)), cu_seqlens)


def context_slice(x: Array, rank: int, size: int, *, dim: int, cu_seqlens: ArrayLike | None = None) -> Array:
    """Return the part of x of context-parallel rank `rank` along the token dimension `dim`; differentiable.

    Lengths as in `context_indices`. Example: `context_slice(x, rank, size, dim=1)` of x [B, S, C].
    """
    bounds = _token_bounds("context_slice", x.shape[dim], cu_seqlens)
    return _take(x, context_indices(bounds, rank, size), dim)


def context_join(parts: Sequence[Array], *, dim: int, cu_seqlens: ArrayLike | None = None) -> Array:
    """Put the parts of ranks 0, 1, ... back in token order, the inverse of `context_slice`; differentiable."""
    size = len(parts)
    bounds = _token_bounds("context_join", sum(part.shape[dim] for part in parts), cu_seqlens)
    order = np.concatenate([context_indices(bounds, rank, size) for rank in range(size)])
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    joined: Any = torch.cat(list(parts), dim) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts, dim)
    return _take(joined, inverse, dim)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The vision blocks of one modality. A block is an image, a video or, with `split_frames`, one frame of a video."""

    name: str
    tokens: Ints  # [N] indices into the real tokens
    grid: Ints  # [blocks, 3]: (time, height, width) of each block in tokens
    seconds: NDArray[np.float32]  # [blocks]: of a temporal patch
    rate: np.float32  # time positions per second
    past_time: bool

    @property
    def lengths(self) -> Ints:
        """By how much each block advances the position of the text after it."""
        sides = self.grid[:, 1:].max(axis=1, initial=0)
        return np.maximum(sides, self.times(self.grid[:, 0] - 1, slice(None)) + 1) if self.past_time else sides

    def times(self, frame: Ints, block: Ints | slice) -> Ints:
        """Return the time positions of frames, from their block's first, in whole numbers."""
        # The same precision and order of operations as transformers, which decide whether a product is below an
        # integer.
        return (frame.astype(np.float32) * (self.rate * self.seconds)[block]).astype(np.int64)

    @classmethod
    def build(
        cls, name: str, modality: int, types: Ints, grid: Ints, seconds: ArrayLike | None, rule: PositionRule
    ) -> "_Blocks":
        tokens = np.flatnonzero(types == modality)
        if modality == VIDEO and rule.split_frames:
            grid = np.repeat(grid, grid[:, 0], axis=0)
            grid[:, 0] = 1
        expected = int(grid.prod(axis=1).sum())
        if expected != tokens.size:
            raise ValueError(
                f"multimodal_positions: there are {tokens.size} {name} placeholder tokens, but {name}_grid_thw "
                f"({len(grid)} blocks) has {expected}; is the prompt truncated, or are grids missing or extra?"
            )
        rate = 1.0 if modality == IMAGE or rule.tokens_per_second is None else rule.tokens_per_second
        return cls(name, tokens, grid, _seconds(len(grid), seconds, rule), np.float32(rate), rule.past_time)


def _seconds(count: int, seconds: ArrayLike | None, rule: PositionRule) -> NDArray[np.float32]:
    """Return the seconds of a temporal patch for each of `count` blocks, 1 by default; raises ValueError."""
    if seconds is None:
        return np.ones(count, np.float32)
    if rule.tokens_per_second is None:
        raise ValueError("multimodal_positions: seconds_per_grid is given, but the rule has no tokens_per_second")
    values = np.asarray(_host(seconds), np.float32)
    if values.shape != (count,):
        raise ValueError(f"multimodal_positions: seconds_per_grid is {values.shape}, expected [{count}], one per video")
    if not bool((np.isfinite(values) & (values >= 0)).all()):
        raise ValueError(f"multimodal_positions: seconds_per_grid is {values}, expected finite numbers, none negative")
    return np.trunc(values) if rule.whole_seconds else values


def _number_tokens(types: Ints, starts: Ints, blocks: tuple[_Blocks, ...]) -> Ints:
    """Return positions [3, N] of the N tokens that are not padding; starts: [B + 1], where each sequence begins."""
    # A text token advances the position by one, a block's first token by the length of its block.
    advance = (types == TEXT).astype(np.int64)
    firsts = []
    for block in blocks:
        sizes = block.grid.prod(axis=1)
        ends = np.cumsum(sizes)
        first = block.tokens[ends - sizes]
        _check_contiguous(block, first, block.tokens[ends - 1], sizes, starts)
        advance[first] = block.lengths
        firsts.append((first, sizes))
    before = np.cumsum(advance) - advance
    sequence_start = np.append(before, 0)[starts[:-1]]  # the appended 0 is for empty sequences at the end
    before -= np.repeat(sequence_start, np.diff(starts))
    positions = np.broadcast_to(before, (3, before.size)).copy()
    for block, (first, sizes) in zip(blocks, firsts, strict=True):
        if len(sizes):
            positions[:, block.tokens] = _block_positions(block, before[first], sizes)
    return positions


def _block_positions(block: _Blocks, start: Ints, sizes: Ints) -> Ints:
    """Return positions [3, tokens] of the tokens of all blocks; start: the position of each block's first token."""
    index = _ranges(np.zeros_like(sizes), sizes)
    block_index = np.repeat(np.arange(len(sizes)), sizes)
    width = block.grid[block_index, 2]
    plane = block.grid[block_index, 1] * width
    frame = index // plane
    in_frame = index - frame * plane
    row = in_frame // width
    return np.stack((block.times(frame, block_index), row, in_frame - row * width)) + start[block_index]


def _check_contiguous(block: _Blocks, first: Ints, last: Ints, sizes: Ints, starts: Ints) -> None:
    """Raise ValueError where the tokens of a block are not contiguous or lie in two sequences."""
    broken = last - first + 1 != sizes
    broken |= np.searchsorted(starts, first, "right") != np.searchsorted(starts, last, "right")
    if bool(broken.any()):
        i = int(np.flatnonzero(broken)[0])
        raise ValueError(
            f"multimodal_positions: {block.name} block {i} of {len(sizes)} has grid {block.grid[i].tolist()} (merged), "
            f"{sizes[i]} tokens, but its placeholder tokens are not one run of that length; are the grids in the order "
            "of the tokens?"
        )


def _deltas(positions: Ints, starts: Ints) -> Ints:
    """Return the largest position + 1 - length of each sequence, [B, 1]; 0 for an empty sequence."""
    lengths = np.diff(starts)
    highest = np.full(lengths.size, -1)
    filled = lengths > 0
    if bool(filled.any()):
        highest[filled] = np.maximum.reduceat(positions.max(axis=0), starts[:-1][filled])
    return (highest + 1 - lengths)[:, None]


def _real_tokens(
    ids: Ints, attention_mask: ArrayLike | None, cu_seqlens: ArrayLike | None
) -> tuple[NDArray[np.bool_] | None, Ints]:
    """Return which tokens are not padding (None: all), and where each sequence begins among them, [B + 1]."""
    if cu_seqlens is not None:
        if ids.ndim != 1 or attention_mask is not None:
            raise ValueError("multimodal_positions: with cu_seqlens expected input_ids [T] and no attention_mask")
        return None, _token_bounds("multimodal_positions", ids.size, cu_seqlens)
    if ids.ndim != 2:
        raise ValueError(f"multimodal_positions: input_ids is {ids.shape}, expected [B, S], or [T] with cu_seqlens")
    if attention_mask is None:
        return None, np.arange(ids.shape[0] + 1) * ids.shape[1]
    is_real = _array(attention_mask, "attention_mask") != 0
    if is_real.shape != ids.shape:
        raise ValueError(f"multimodal_positions: attention_mask is {is_real.shape}, expected {ids.shape} as input_ids")
    return is_real, np.concatenate(([0], np.cumsum(is_real.sum(axis=1))))


def _token_grids(name: str, grid: ArrayLike | None, rule: PositionRule) -> Ints:
    """Return grids [N, 3] in tokens: height and width in patches, divided by the merge size."""
    if grid is None:
        return np.zeros((0, 3), np.int64)
    patches = _array(grid, name)
    merge = rule.spatial_merge_size
    if patches.ndim != 2 or patches.shape[1] != 3:
        raise ValueError(f"multimodal_positions: {name} is {patches.shape}, expected [N, 3]")
    bad = (patches < 1).any(axis=1) | (patches[:, 1:] % merge != 0).any(axis=1)
    if bool(bad.any()):
        wrong = patches[np.flatnonzero(bad)[0]].tolist()
        raise ValueError(
            f"multimodal_positions: {name} has {wrong}, expected height and width in multiples of {merge}, none below 1"
        )
    return patches // np.array([1, merge, merge])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of arange(start, start + length) for all pairs."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(starts - (ends - lengths), lengths)


def _bounds(cu_seqlens: ArrayLike) -> Ints:
    bounds = _array(cu_seqlens, "cu_seqlens")
    if bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0 or bool((np.diff(bounds) < 0).any()):
        raise ValueError(f"cu_seqlens is {bounds.tolist()}, expected [B + 1], starting at 0 and never decreasing")
    return bounds


def _token_bounds(name: str, num_tokens: int, cu_seqlens: ArrayLike | None) -> Ints:
    bounds = np.array([0, num_tokens]) if cu_seqlens is None else _bounds(cu_seqlens)
    if bounds[-1] != num_tokens:
        raise ValueError(f"{name}: cu_seqlens ends at {bounds[-1]}, expected {num_tokens}, the number of tokens")
    return bounds


def _take(x: Array, index: Ints, dim: int) -> Array:
    if isinstance(x, torch.Tensor):
        return x.index_select(dim, torch.from_numpy(index).to(x.device))
    return np.take(x, index, axis=dim)


def _host(x: ArrayLike) -> np.ndarray:
    """Return x as a numpy array on the host."""
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def _array(x: ArrayLike, name: str) -> Ints:
    """Return x as int64 on the host; raises ValueError where it has other numbers than integers."""
    array = _host(x)
    if array.dtype.kind not in "iub" and array.size:
        raise ValueError(f"{name} is {array.dtype}, expected integers")
    return array.astype(np.int64, copy=False)


def _like(array: np.ndarray, x: Array) -> Array:
    """Return array in the kind of x: numpy, or torch on x's device."""
    if isinstance(x, torch.Tensor):
        return torch.from_numpy(array).to(x.device)
    return array


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
