"""Attention over the cache in Triton: bits depend neither on how stored cuts are combined nor on a call's padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from whorl import ops

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
import triton
import triton.language as tl

from whorl.ops.attention.cuts_triton import fold
from whorl.ops.attention.fold_triton import fold_stored
from whorl.ops.attention.paged_triton import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 32


@triton.jit
def _fold_ahead(out_ptr, top_ptr, total_ptr, y_ptr, first, stop, D: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = tl.arange(0, D)
    out, total = fold_stored(out_ptr, top_ptr, total_ptr, 0, first, stop, channels, D, AHEAD)
    tl.store(y_ptr + channels, out)
    tl.store(y_ptr + D + channels, total)


@triton.jit
def _fold_in_order(out_ptr, top_ptr, total_ptr, y_ptr, first, stop, D: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = tl.arange(0, D)[None, :]
    top, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    out = tl.zeros((1, D), tl.float32)
    for i in range(first, stop):
        at = i + tl.zeros((1,), tl.int32)
        cut_out = tl.load(out_ptr + at[:, None] * D + channels)
        top, total, out = fold(top, total, out, tl.load(top_ptr + at), tl.load(total_ptr + at), cut_out)
    tl.store(y_ptr + channels, out)
    tl.store(y_ptr + D + channels, tl.broadcast_to(total[:, None], out.shape))


def folded(kernel: Any, stored: list[Tensor], first: int, stop: int, ahead: int) -> Tensor:
    y = torch.empty(2, CHANNELS, device=DEVICE)
    kernel[(1,)](*stored, y, first, stop, D=CHANNELS, AHEAD=ahead, num_warps=1, enable_fp_fusion=False)
    return y


@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (0, 8), (0, 21), (3, 20), (5, 6), (7, 7)])
def test_cuts_that_are_combined_ahead_have_the_bits_of_one_after_the_other(first: int, stop: int, ahead: int) -> None:
    torch.manual_seed(0)
    stored = [torch.randn(24, CHANNELS), 4 * torch.randn(24), torch.rand(24)]
    for i in (0, 5, 11):  # cuts without a visible key
        stored[0][i], stored[1][i], stored[2][i] = 0, -torch.inf, 0
    stored[1][21:] = 1e4  # cuts past the last, which nothing may read
    stored = [x.to(DEVICE) for x in stored]
    expected = folded(_fold_in_order, stored, first, stop, ahead)
    assert torch.equal(folded(_fold_ahead, stored, first, stop, ahead), expected)
    if stop - first > 2:
        assert not torch.equal(folded(_fold_ahead, stored, first, stop - 1, ahead), expected)


@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ((40,), (60,)),
        pytest.param((35, 20), (300, 20), marks=pytest.mark.slow),
        pytest.param((9,), (150,), marks=pytest.mark.slow),
    ],
)
def test_padding_of_a_recorded_call_changes_no_bit(queries: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    """Sequences without tokens, and tokens of no sequence behind the last, whose results are zero."""
    sizes = {"heads": 4, "kv_heads": 2, "dim": 32}
    torch.manual_seed(0)
    values = ops.paged_attention.make(
        **sizes, queries=queries, contexts=contexts, tokens=(sum(queries),), dtype=torch.bfloat16, device=DEVICE
    )
    expected = ops.paged_attention(**values, backend="triton")
    count, padded = sum(queries), 64
    values["q"] = torch.cat((values["q"], torch.full_like(values["q"][:1], torch.nan).expand(padded - count, -1, -1)))
    for name, filler in (("context_lens", 0), ("query_starts", count)):
        values[name] = torch.nn.functional.pad(values[name], (0, 3 - len(queries)), value=filler)
    values["block_tables"] = torch.nn.functional.pad(values["block_tables"], (0, 0, 0, 3 - len(queries)))
    actual = attention(**values)  # the operator itself checks numbers that it can read on the host, and refuses these
    assert torch.equal(actual[:count], expected)
    assert not actual[count:].any()


def test_a_token_finds_its_sequence_by_whole_warps() -> None:
    """With BLOCK_B between 1 and 32 the loops over cuts are several times slower; `block_of_sequences` says why."""
    from whorl.ops.attention.decode_triton import block_of_sequences

    for count in range(1, 300):
        block = block_of_sequences(count)
        assert block >= count
        assert block == 1 or block >= 32
