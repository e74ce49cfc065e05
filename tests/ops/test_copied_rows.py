"""Keys and values as rows of a matrix, from which the copy engine fetches boxes: addresses, and what has none."""

import itertools

import pytest
import torch
from torch import Tensor

from whorl.ops import _hopper
from whorl.ops._rows import Strides
from whorl.ops.attention import prompt_triton
from whorl.ops.attention.copied_rows import FEWEST_KEYS, apart, box_of, rows_reason

BLOCKS, TOKENS, HEADS, CHANNELS = 3, 4, 2, 8


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


LAYOUTS: dict[str, Tensor] = {
    "as they are": numbered(BLOCKS, TOKENS, HEADS, CHANNELS),
    "heads first": numbered(BLOCKS, HEADS, TOKENS, CHANNELS).transpose(1, 2),
    "heads outside of blocks": numbered(HEADS, BLOCKS, TOKENS, CHANNELS).permute(1, 2, 0, 3),
    "keys beside values": numbered(BLOCKS, 2, TOKENS, HEADS, CHANNELS)[:, 1],
    "part of wider heads": numbered(BLOCKS, TOKENS, HEADS, CHANNELS + 8)[..., :CHANNELS],
    "part of wider rows": numbered(BLOCKS, TOKENS, HEADS + 3, CHANNELS)[:, :, 1 : 1 + HEADS],
    "one head": numbered(BLOCKS, TOKENS, 1, CHANNELS),
    "one block": numbered(1, TOKENS, HEADS, CHANNELS),
}


def strides_of(x: Tensor) -> Strides:
    return x.stride()[:3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_and_a_column_are_where_the_strides_say(name: str) -> None:
    x = LAYOUTS[name]
    strides = strides_of(x)
    assert rows_reason(x.shape, strides) is None
    block_rows, head_rows, head_columns = apart(x.shape, strides)
    blocks, tokens, heads, channels = x.shape
    for b, t, h in itertools.product(range(blocks), range(tokens), range(heads)):
        row, column = b * block_rows + t + h * head_rows, h * head_columns
        first = x.flatten()[0] + row * strides[1] + column
        assert x[b, t, h].tolist() == list(range(first, first + channels))


@pytest.mark.parametrize(
    ("strides", "said"),
    [
        ((100, 24, 8), "blocks lie 100 elements apart, and tokens 24"),
        ((0, 8, 36), "heads lie 36 elements apart, and tokens 8"),
        ((64, 0, 8), "tokens lie 0 elements apart"),
    ],
)
def test_what_does_not_lie_in_rows(strides: Strides, said: str) -> None:
    reason = rows_reason((BLOCKS, TOKENS, HEADS, CHANNELS), strides)
    assert reason is not None
    assert said in reason


def test_boxes_divide_blocks() -> None:
    assert [box_of(size) for size in (1, 8, 12, 16, 48, 128, 256, 384)] == [1, 8, 4, 16, 16, 128, 128, 128]


def reason_for(cache: Tensor, *, lse: Tensor | None = None) -> str | None:
    q = meta(32, 4, 128)
    strides = (*q.stride()[:2], *strides_of(cache), *strides_of(cache), 9)
    return prompt_triton.hopper_reason([q, cache, cache], strides, lse)


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper, "compute_capability", lambda device: _hopper.HOPPER)
    monkeypatch.setattr(_hopper, "is_interpreting", lambda: False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("block", [8, 16, 48, 128])
def test_the_kernel_of_prompts_takes_the_layouts_whose_bits_are_compared(block: int) -> None:
    """So that tests/ops/test_attention_bits.py compares it, and not the plain kernel with itself."""
    assert reason_for(meta(9, block, 2, 128)) is None
    assert reason_for(meta(9, 2, block, 128).transpose(1, 2)) is None
    assert reason_for(meta(9, 2, block, 2, 128)[:, 1]) is None


@pytest.mark.usefixtures("hopper")
def test_the_kernel_of_prompts_says_what_it_does_not_take() -> None:
    assert reason_for(meta(9, 12, 2, 128)) == f"copies {FEWEST_KEYS} keys or more at a time, but blocks hold 12"
    assert reason_for(meta(1, 12, 2, 128), lse=torch.empty(32, 4, device="meta")) is None  # training has no blocks
    reason = reason_for(torch.empty_strided((9, 16, 2, 128), (4104, 256, 128, 1), dtype=torch.bfloat16, device="meta"))
    assert reason == "copies whole rows, but blocks lie 4104 elements apart, and tokens 256"
