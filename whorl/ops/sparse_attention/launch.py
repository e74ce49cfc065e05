"""Launch the kernels of sparse attention: which ones, with which tiles, and how many tokens at a time."""

import torch
from torch import Tensor

from whorl.device import is_interpreting, multiprocessors

from .._hopper import gluon_reason
from .._rows import ceil_div, power_of_2
from . import triton as plain

LOG2_E = 1.4426950408889634
# Bytes of scratch memory for P and dS, or for the shares of dkv before they are summed: at 32k tokens less than a tenth
# of dq.
SCRATCH = 320 * 2**20
REGISTERS = 224  # per thread of the two Gluon consumers; the producer gets what remains of 504
DQ_REGISTERS = 232  # the same for the kernel of dq
ENTRIES_BLOCK = 1024  # indices of a token that one program of the entries kernel takes
REDUCE_WARPS = 1
REDUCED = 128  # tokens whose entries the reduction reads at once


def hopper_reason(heads: int, dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return None if the Hopper kernels take these shapes, else why the plain Triton kernels run."""
    if (dim, value_dim) != (576, 512) or heads not in (64, 128):
        return f"takes 64 or 128 heads of 576 channels, 512 of them values, got {heads} of {dim} and {value_dim}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes 16-bit tensors, got {dtype}"
    return gluon_reason(device)


def _aligned(x: Tensor) -> Tensor:
    """Return x contiguous and on a 16-byte boundary, as asynchronous copies need it."""
    x = x.contiguous()
    return x if x.is_meta or x.data_ptr() % 16 == 0 else x.clone()


def _head_tile(heads: int, most: int) -> int:
    """Return the heads of a tile: a power of two from 16, the least of tensor cores, to `most`."""
    return max(16, min(most, power_of_2(heads)))


def _tiles(heads: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    """Return the heads and keys of one program's tiles, its warps, and the stages of its pipeline of loads."""
    return {"BLOCK_H": heads, "BLOCK_K": keys, "num_warps": warps, "num_stages": stages}


def _forward_tiles(heads: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:  # without tensor cores: meant for checking, not for speed
        return _tiles(16, 16, 4, 1)
    if dim > 256:  # with 64 heads registers would spill, and only Hopper's shared memory would be large enough
        return _tiles(_head_tile(heads, 32), 64, 8, 2)
    return _tiles(_head_tile(heads, 64), 64, 4, 3)


def _dq_tiles(heads: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32 or dim > 256:
        return _forward_tiles(heads, dim, dtype)
    return _tiles(_head_tile(heads, 64), 32, 4, 1)


def _dkv_tiles(heads: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """Return the columns of one program of the second pass, and its tiles, which have all heads."""
    heads = max(16, power_of_2(heads))
    return (32, _tiles(heads, 16, 4, 1)) if dtype == torch.float32 else (128, _tiles(heads, 64, 4, 3))


def _channels(dim: int, value_dim: int) -> dict[str, int]:
    """Return the sizes of a kernel that reads whole keys."""
    blocks = {"BLOCK_DV": max(16, power_of_2(value_dim)), "BLOCK_R": max(16, power_of_2(dim - value_dim))}
    return {"D": dim, "DV": value_dim, "WIDEN": is_interpreting(), **blocks}


def forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    value_dim: int,
    deterministic: bool,
    *,
    use_gluon: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the forward; `deterministic` concerns the backward alone, as the forward adds in a fixed order anyway."""
    value_dim = value_dim or q.shape[2]
    q, kv, indices = _aligned(q), _aligned(kv), indices.contiguous()
    (count, heads, dim), topk = q.shape, indices.shape[1]
    out = torch.empty(count, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse
    if use_gluon and hopper_reason(heads, dim, value_dim, q.dtype, q.device) is None:
        from .forward_gluon_triton import _sparse_forward_gluon_kernel

        _sparse_forward_gluon_kernel[(heads // 64, count)](
            q, kv, indices, out, lse, dim, topk, scale * LOG2_E, H=heads, REGISTERS=REGISTERS, num_warps=4
        )
        return out, lse
    tiles = _forward_tiles(heads, dim, q.dtype)
    plain._sparse_forward_kernel[(ceil_div(heads, tiles["BLOCK_H"]), count)](
        q, kv, indices, out, lse, dim, topk, scale * LOG2_E, H=heads, **_channels(dim, value_dim), **tiles
    )
    return out, lse


def backward(
    dlse: Tensor | None, scale: float, deterministic: bool, *, use_gluon: bool = True, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the backward. tensors: dout, q, kv, indices, out and lse, by name."""
    return _Backward(tensors, dlse, scale, deterministic, use_gluon).run()


class _Backward:
    """One backward: its tensors prepared for the kernels, and the two passes over them.

    For some tokens at a time the first pass computes dq, and stores the weights P and the score gradients dS; the
    second multiplies these, which gives the tokens' shares of dkv.
    """

    def __init__(
        self, tensors: dict[str, Tensor], dlse: Tensor | None, scale: float, deterministic: bool, use_gluon: bool
    ) -> None:
        self.dout, self.q, self.kv = (_aligned(tensors[name]) for name in ("dout", "q", "kv"))
        self.indices, self.lse = tensors["indices"].contiguous(), tensors["lse"].contiguous()
        self.scale, self.deterministic = scale, deterministic
        q = tensors["q"]
        (self.count, self.heads, self.dim), self.topk = q.shape, self.indices.shape[1]
        self.value_dim, self.num_keys = self.dout.shape[2], self.kv.shape[0]
        self.pitch = ceil_div(self.topk, 64) * 64
        self.gluon = use_gluon and hopper_reason(self.heads, self.dim, self.value_dim, q.dtype, q.device) is None
        self.dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.dkv = torch.zeros(self.num_keys, self.dim, dtype=torch.float32, device=q.device)
        block = power_of_2(self.value_dim)
        self.delta = plain.delta_of(tensors["out"].contiguous(), self.dout, dlse, rows=4, block=block)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return dq and dkv."""
        tokens = self._tokens_at_a_time()
        if self.count and self.heads and self.topk and self.num_keys:
            p, ds = (self.q.new_empty(tokens, self.heads, self.pitch) for _ in range(2))
            for first in range(0, self.count, tokens):
                num_tokens = min(tokens, self.count - first)
                self._first_pass(first, num_tokens, p, ds)
                self._second_pass(first, num_tokens, p, ds)
        else:
            self.dq.zero_()
        return self.dq, self.dkv.to(self.kv.dtype).view(self.kv.shape)

    def _tokens_at_a_time(self) -> int:
        """Return how many tokens fit the scratch memory, rounded down to whole waves of the first pass."""
        scores = 2 * self.heads * self.pitch * self.q.element_size()
        # The deterministic mode stores the shares of each token, and for every key its entry in the token's indices.
        shares = 4 * max(self.topk * self.dim, self.num_keys) if self.deterministic else 0
        tokens = max(1, SCRATCH // max(scores, shares, 1))
        wave = max(1, multiprocessors(self.q.device) // ceil_div(self.heads, 64))
        return min(self.count, tokens // wave * wave or tokens)

    def _first_pass(self, first: int, num_tokens: int, p: Tensor, ds: Tensor) -> None:
        """Write dq of num_tokens tokens from token `first` on, and their P and dS, [tokens, H, pitch] each."""
        tensors = (self.q, self.kv, self.indices, self.lse, self.delta, self.dout, self.dq, p, ds)
        numbers = (self.dim, first, self.topk, self.pitch, self.scale)
        if self.gluon:
            from .backward_gluon_triton import _sparse_dq_gluon_kernel

            _sparse_dq_gluon_kernel[(self.heads // 64, num_tokens)](
                *tensors, *numbers, H=self.heads, REGISTERS=DQ_REGISTERS, num_warps=4
            )
            return
        tiles = _dq_tiles(self.heads, self.dim, self.q.dtype)
        plain._sparse_dq_kernel[(ceil_div(self.heads, tiles["BLOCK_H"]), num_tokens)](
            *tensors, *numbers, H=self.heads, **_channels(self.dim, self.value_dim), **tiles
        )

    def _second_pass(self, first: int, num_tokens: int, p: Tensor, ds: Tensor) -> None:
        """Add the shares of these tokens to dkv, atomically or, if deterministic, per key in token order."""
        if not self.deterministic:
            self._compute_shares(first, num_tokens, p, ds, self.dkv)
            return
        shares = self.dkv.new_empty(num_tokens, self.topk, self.dim)
        self._compute_shares(first, num_tokens, p, ds, shares)
        entries = self.indices.new_full((num_tokens, self.num_keys), -1)
        plain._sparse_entries_kernel[(num_tokens, ceil_div(self.topk, ENTRIES_BLOCK))](
            self.indices, entries, first, self.num_keys, self.topk, BLOCK=ENTRIES_BLOCK, num_warps=4
        )
        plain._sparse_reduce_kernel[(self.num_keys,)](
            shares,
            entries,
            self.dkv,
            num_tokens,
            self.num_keys,
            self.topk,
            D=self.dim,
            BLOCK_D=power_of_2(self.dim),
            BLOCK_T=REDUCED,
            num_warps=REDUCE_WARPS,
        )

    def _compute_shares(self, first: int, num_tokens: int, p: Tensor, ds: Tensor, destination: Tensor) -> None:
        """Add shares to destination [S, D] atomically or, if deterministic, store them in it as [tokens, K, D]."""
        arguments = (self.q, self.dout, self.indices, p, ds, destination, first, self.topk, self.pitch)
        adds = not self.deterministic
        if self.gluon:
            from .backward_gluon_triton import _sparse_dkv_gluon_kernel

            _sparse_dkv_gluon_kernel[(2, num_tokens)](
                *arguments, H=self.heads, ADD=adds, REGISTERS=REGISTERS, num_warps=4
            )
            return
        most, tiles = _dkv_tiles(self.heads, self.q.dtype)
        for begin, end in ((0, self.value_dim), (self.value_dim, self.dim)):
            if begin < end:
                columns = max(16, min(most, power_of_2(end - begin)))
                plain._sparse_dkv_kernel[(ceil_div(end - begin, columns), num_tokens)](
                    *arguments,
                    begin,
                    H=self.heads,
                    D=self.dim,
                    DV=self.value_dim,
                    WITH_V=begin == 0,
                    ADD=adds,
                    BLOCK_C=columns,
                    WIDEN=is_interpreting(),
                    **tiles,
                )
