"""whorl.ascend.npu_fused_infer_attention_score: the vendor's formula, torch's own attention, and our paged one."""

from typing import Any

import pytest
import torch
from test_ascend import randn
from test_ascend_moe import HALF, check
from torch import Tensor

from whorl import ascend, ops

SPARSE: dict[str, dict[str, Any]] = {
    "no mask": {},
    "full mask": {"mask": "full"},
    "full mask, limited": {"mask": "full", "pre_tokens": 3, "next_tokens": 1},
    "all mask": {"mask": "full", "sparse_mode": 1, "pre_tokens": 0},
    "left up": {"mask": "compressed", "sparse_mode": 2},
    "right down": {"mask": "compressed", "sparse_mode": 3},
    "band": {"mask": "compressed", "sparse_mode": 4, "pre_tokens": 4, "next_tokens": 0},
}


def triangle() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def with_mask(case: dict[str, Any], *shape: int) -> dict[str, Any]:
    case = dict(case)
    kind = case.pop("mask", None)
    if kind == "full":
        mask = torch.rand(shape) < 0.4
        mask[..., 0] = False
        case["atten_mask"] = mask
    elif kind == "compressed":
        case["atten_mask"] = triangle()
    return case


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("name", SPARSE)
def test_attention(name: str, layout: str, lse: bool, device: str) -> None:
    order = {"BSH": lambda x: x.flatten(2), "BSND": lambda x: x}.get(layout, lambda x: x.transpose(1, 2).contiguous())
    q, k, v = (order(randn(2, n, h, 16, dtype=HALF)) for n, h in ((5, 4), (9, 2), (9, 2)))
    more = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.25, "input_layout": layout, "softmax_lse_flag": lse}
    check("npu_fused_infer_attention_score", device, q, k, v, **more, **with_mask(SPARSE[name], 2, 1, 5, 9))
    lengths = {"actual_seq_lengths": [5, 3], "actual_seq_lengths_kv": [9, 4]}
    case = with_mask(SPARSE[name], 5, 9)
    check("npu_fused_infer_attention_score", device, q, k, v, **more, **lengths, **case)


@pytest.mark.parametrize("pages", [False, True])
def test_values_of_another_width(pages: bool, device: str) -> None:
    """Heads of 192 with values of 128, as the vendor documents for TND."""
    q, k, v = randn(7, 4, 192, dtype=HALF), randn(20, 2, 192, dtype=HALF), randn(20, 2, 128, dtype=HALF)
    more: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "TND"}
    more |= {"softmax_lse_flag": True, "sparse_mode": 3, "atten_mask": triangle(), "actual_seq_lengths": [4, 4, 7]}
    more["actual_seq_lengths_kv"] = [9, 12, 20]
    if pages:
        k, v = (randn(5, 16, 2 * d, dtype=HALF) for d in (192, 128))
        more |= {"block_table": torch.tensor([[2, 0], [1, 4], [3, 2]], dtype=torch.int32), "block_size": 16}
        more["actual_seq_lengths_kv"] = [9, 3, 20]
    out, _ = check("npu_fused_infer_attention_score", device, q, k, v, **more)
    assert out.shape == (7, 4, 128)


def test_values_of_another_width_are_for_packed_sequences() -> None:
    q, v = randn(1, 5, 4, 192, dtype=HALF), randn(1, 5, 4, 128, dtype=HALF)
    with pytest.raises(ValueError, match="BSND needs values of the keys' head size 192, got 128"):
        ascend.npu_fused_infer_attention_score(q, q, v, num_heads=4, input_layout="BSND")


@pytest.mark.parametrize("name", ["no mask", "right down", "band"])
def test_packed_attention(name: str, device: str) -> None:
    q, k, v = (randn(n, h, 128, dtype=HALF) for n, h in ((7, 4), (20, 2), (20, 2)))
    more = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "TND", "softmax_lse_flag": True}
    lengths = {"actual_seq_lengths": [4, 4, 7], "actual_seq_lengths_kv": [9, 12, 20]}
    check("npu_fused_infer_attention_score", device, q, k, v, **more, **lengths, **with_mask(SPARSE[name]))


@pytest.mark.parametrize("heads_first", [False, True])
def test_pages(heads_first: bool, device: str) -> None:
    """Either layout of the cache, and one query, with which only a full mask counts."""
    cache = [randn(7, 128, 2, 32, dtype=HALF) for _ in range(2)]
    k, v = (x.transpose(1, 2).contiguous() if heads_first else x.flatten(2) for x in cache)
    table = torch.tensor([[5, 0, 2], [3, 1, 6]], dtype=torch.int32)
    more = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.2, "block_size": 128, "block_table": table}
    more |= {"actual_seq_lengths_kv": [300, 17], "input_layout": "BNSD" if heads_first else "BSND"}
    cases = [(3, "right down"), (3, "full mask"), (1, "band"), (1, "full mask")]
    for count, name in cases:
        q = randn(2, count, 4, 32, dtype=HALF)
        q = q.transpose(1, 2).contiguous() if heads_first else q
        mask = with_mask(SPARSE[name], 2, 1, count, 3 * 128)
        check("npu_fused_infer_attention_score", device, q, k, v, **more, **mask)


def test_attention_is_torch_sdpa() -> None:
    q, k, v = (randn(2, h, n, 32) for n, h in ((5, 4), (9, 2), (9, 2)))
    hidden = torch.rand(2, 1, 5, 9) < 0.4
    hidden[..., 0] = False
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, ~hidden, scale=0.3, enable_gqa=True)
    more = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.3, "input_layout": "BNSD"}
    with ascend.limits("ignore"):  # for fp32
        got, lse = ascend.npu_fused_infer_attention_score(q, k, v, atten_mask=hidden, **more)
    torch.testing.assert_close(got, expected)
    assert lse.numel() == 0


MASKS = ["prefill", "decode", "batched decode"]


@pytest.mark.parametrize("name", MASKS)
def test_three_masks_give_our_paged_attention(name: str) -> None:
    """Prefill with the compressed triangle, decode without a mask, several queries with a mask of one's own."""
    count = {"prefill": 40, "decode": 1, "batched decode": 4}[name]
    cache = [randn(5, 128, 2, 64, dtype=HALF) for _ in range(2)]
    q, table = randn(count, 8, 64, dtype=HALF), torch.tensor([[4, 1, 2]], dtype=torch.int32)
    expected = ops.paged_attention(
        q,
        *cache,
        table,
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([300], dtype=torch.int32),
        scale=0.125,
    )
    mask: dict[str, Any] = {"sparse_mode": 0}
    if name == "prefill":
        mask = {"sparse_mode": 3, "atten_mask": triangle()}
    elif name == "batched decode":
        mask["atten_mask"] = (torch.arange(384) > torch.arange(296, 300)[:, None])[None, None]
    got, _ = ascend.npu_fused_infer_attention_score(
        q[None],
        *(x.flatten(2) for x in cache),
        num_heads=8,
        num_key_value_heads=2,
        scale=0.125,
        input_layout="BSND",
        block_table=table,
        block_size=128,
        actual_seq_lengths=[count],
        actual_seq_lengths_kv=[300],
        **mask,
    )
    torch.testing.assert_close(got[0], expected)
