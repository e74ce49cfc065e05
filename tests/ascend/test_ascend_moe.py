"""whorl.ascend's names for mixture of experts and quantisation: the vendor's formulas, gradients, limits, and the
chains that our own operators and transformers give too. Attention's limits and errors are here as well."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from npu import attention_kernels, kernels, moe_kernels
from test_ascend import BEYOND as FIRST_BEYOND
from test_ascend import DTYPES, judge_limit, randn
from test_ascend_gated_delta import BEYOND as DELTA_BEYOND
from torch import Tensor

from whorl import ascend, ops
from whorl.contracts.sparse import SPARSE

KERNELS: dict[str, Callable[..., Any]] = kernels.KERNELS | moe_kernels.KERNELS | attention_kernels.KERNELS
HALF = torch.bfloat16


def close(got: Any, expected: Any) -> None:
    """Integers exactly, numbers but for the order of fp32 operations."""
    if isinstance(expected, tuple | list):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            close(g, e)
        return
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    torch.testing.assert_close(got, expected, rtol=4 * eps, atol=8 * eps, equal_nan=True)


def moved(value: Any, device: str) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(moved(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


def check(name: str, device: str, *args: Any, **kwargs: Any) -> Any:
    """The same call of ours, on `device`, and of the formula, on the CPU."""
    keywords = {n: moved(v, device) for n, v in kwargs.items()}
    got = moved(getattr(ascend, name)(*moved(list(args), device), **keywords), "cpu")
    close(got, KERNELS[name](*args, **kwargs))
    return got


def distinct(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits far enough apart for every dtype to choose alike."""
    rows = torch.stack([torch.randperm(shape[-1]) for _ in range(torch.Size(shape[:-1]).numel())])
    return ((rows - shape[-1] / 2) / 16).view(shape).to(dtype)


# Gating.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "k"), [((5, 16), 4), ((2, 3, 12), 12), ((1, 3), 1)])
def test_gating_top_k_softmax(shape: tuple[int, ...], k: int, dtype: torch.dtype, device: str) -> None:
    x = distinct(*shape, dtype=dtype)
    check("npu_moe_gating_top_k_softmax", device, x, k=k)
    check("npu_moe_gating_top_k_softmax", device, x, torch.rand(shape[:-1]) < 0.5, k)


GATING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"norm_type": 1, "routed_scaling_factor": 2.5, "eps": 1e-3},
    "deepseek": {"norm_type": 1, "k_group": 2, "group_count": 4, "group_select_mode": 1},
    "best of groups": {"k_group": 3, "group_count": 8, "out_flag": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", GATING)
def test_gating_top_k(name: str, with_bias: bool, dtype: torch.dtype, device: str) -> None:
    keywords = dict(GATING[name])
    bias = (torch.arange(32).to(dtype) / 64) if with_bias else None
    x = distinct(6, 32, dtype=dtype)
    if keywords.get("out_flag"):
        check("npu_moe_gating_top_k", device, x, 4, bias=bias, **keywords)
        return
    on_device = None if bias is None else bias.to(device)
    got = moved(ascend.npu_moe_gating_top_k(x.to(device), 4, bias=on_device, **keywords), "cpu")
    close(got[:2], KERNELS["npu_moe_gating_top_k"](x, 4, bias=bias, **keywords)[:2])
    assert got[2].shape == x.shape  # not asked for: any numbers


def test_ties_go_to_the_lowest_id() -> None:
    x = torch.zeros(2, 12)
    assert ascend.npu_moe_gating_top_k_softmax(x, k=3)[1].tolist() == [[0, 1, 2]] * 2
    assert ascend.npu_moe_gating_top_k(x, 3, norm_type=1, k_group=2, group_count=4)[1].tolist() == [[0, 1, 2]] * 2


def test_gating_top_k_is_transformers_deepseek() -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(hidden_size=8, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2)
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.copy_(torch.rand(16) / 2)
    logits, weights, ids = (x.detach() for x in router(randn(9, 8)))
    got = ascend.npu_moe_gating_top_k(
        logits,
        4,
        bias=router.e_score_correction_bias,
        k_group=2,
        group_count=4,
        group_select_mode=1,
        norm_type=1,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    order = ids.argsort(-1)
    mine = got[1].long().argsort(-1)
    assert torch.equal(got[1].long().gather(-1, mine), ids.gather(-1, order))
    torch.testing.assert_close(got[0].gather(-1, mine), weights.gather(-1, order))


@pytest.mark.parametrize("norm_type", [0, 1])
def test_gating_gradient(norm_type: int) -> None:
    """Of the weights, the choice held; none through the scores."""
    x = distinct(3, 8).double().requires_grad_()
    with ascend.limits("ignore"):
        assert torch.autograd.gradcheck(lambda a: ascend.npu_moe_gating_top_k(a, 3, norm_type=norm_type)[0], (x,))
        assert not ascend.npu_moe_gating_top_k(x, 3, out_flag=True)[2].requires_grad


# Routing.

ROUTING: dict[str, dict[str, Any]] = {
    "counts": {"expert_tokens_num_type": 1},
    "cumulative": {"expert_tokens_num_type": 0},
    "pairs": {"expert_tokens_num_type": 2},
    "scatter": {"expert_tokens_num_type": 1, "row_idx_type": 1},
    "some experts": {"expert_tokens_num_type": 1, "active_expert_range": [2, 5]},
    "some experts, scatter": {"expert_tokens_num_type": 2, "active_expert_range": [2, 5], "row_idx_type": 1},
    "some rows": {"expert_tokens_num_type": 1, "active_num": 4},
    "its own defaults": {"expert_tokens_num_flag": False},
    "pairs, not asked for": {"expert_tokens_num_type": 2, "expert_tokens_num_flag": False},
    "capacity": {"drop_pad_mode": 1, "expert_capacity": 2},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTING)
def test_init_routing(name: str, dtype: torch.dtype, device: str) -> None:
    x, ids = randn(5, 6, dtype=dtype), torch.stack([torch.randperm(7)[:3] for _ in range(5)]).int()
    keywords = {"expert_num": 7, "expert_tokens_num_flag": True} | ROUTING[name]
    check("npu_moe_init_routing_v2", device, x, ids, **keywords)
    check("npu_moe_init_routing_v2", device, x, ids, scale=torch.rand(5), **keywords)


@pytest.mark.parametrize("smooth", [None, 1, 7])
def test_init_routing_quantises(smooth: int | None, device: str) -> None:
    x, ids = randn(5, 6, dtype=HALF), torch.stack([torch.randperm(7)[:3] for _ in range(5)]).int()
    scale = None if smooth is None else torch.rand(smooth, 6) + 0.5
    keywords = {"expert_num": 7, "expert_tokens_num_flag": True, "expert_tokens_num_type": 1, "quant_mode": 1}
    check("npu_moe_init_routing_v2", device, x, ids, scale=scale, **keywords)
    keywords["active_expert_range"] = [2, 5]
    check("npu_moe_init_routing_v2", device, x, ids, scale=scale if smooth != 7 else scale[:3], **keywords)
    keywords |= {"active_expert_range": [], "drop_pad_mode": 1, "expert_capacity": 2}
    check("npu_moe_init_routing_v2", device, x, ids, scale=scale, **keywords)


def test_init_routing_with_a_given_scale(device: str) -> None:
    x, ids = 40 * randn(5, 6, dtype=HALF), torch.stack([torch.randperm(7)[:3] for _ in range(5)]).int()
    more = {"scale": torch.tensor([2.0]), "offset": torch.tensor([3.0]), "expert_num": 7, "quant_mode": 0}
    check("npu_moe_init_routing_v2", device, x, ids, **more)
    assert ascend.npu_moe_init_routing_v2(x, ids, **more)[0].abs().max() >= 127  # some do not fit into int8


def test_init_routing_of_no_rows() -> None:
    x, ids = randn(0, 6, dtype=HALF), torch.zeros(0, 3, dtype=torch.int32)
    rows, places, counts, scales = ascend.npu_moe_init_routing_v2(x, ids, expert_num=7, expert_tokens_num_flag=True)
    assert (rows.shape, places.shape, scales.shape) == ((0, 6), (0,), (0,))
    assert counts.tolist() == [0] * 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing(mode: int, dtype: torch.dtype, device: str) -> None:
    shape = (12, 6) if mode in (0, 2) else (3, 4, 6)
    index = torch.randperm(12).int()
    if mode in (1, 3):
        index[:2] = -1
    rows, skip, bias = randn(*shape, dtype=dtype), randn(4, 6, dtype=dtype), randn(3, 6, dtype=dtype)
    scales, experts = randn(4, 3, dtype=dtype), torch.randint(0, 3, (4, 3)).int()
    check("npu_moe_finalize_routing", device, rows, None, None, None, scales, index, None, mode)
    check("npu_moe_finalize_routing", device, rows, skip, skip, bias, scales, index, experts, mode)
    check("npu_moe_finalize_routing", device, rows, skip, None, None, None, index, None, mode, 3)
    with pytest.raises(ValueError, match="skip2 needs skip1"):
        ascend.npu_moe_finalize_routing(rows, None, skip, None, None, index, None, mode, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_permute_and_back(dtype: torch.dtype, device: str) -> None:
    tokens, indices, probs = randn(5, 6, dtype=dtype), torch.randint(0, 4, (5, 3)), randn(5, 3, dtype=dtype)
    for rows in (None, 0, 10, -4, 99):
        permuted, where = check("npu_moe_token_permute", device, tokens, indices, rows)
        check("npu_moe_token_unpermute", device, permuted, where, probs)
    check("npu_moe_token_permute", device, tokens, indices[:, 0].int())
    permuted, where = ascend.npu_moe_token_permute(tokens, indices)
    close(ascend.npu_moe_token_unpermute(permuted, where), tokens.repeat_interleave(3, 0))


def test_token_permute_gradients() -> None:
    tokens, probs = randn(4, 3).double().requires_grad_(), randn(4, 2).double().requires_grad_()
    indices = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])

    def run(tokens: Tensor, probs: Tensor) -> Tensor:
        permuted, where = ascend.npu_moe_token_permute(tokens, indices, 6)
        return ascend.npu_moe_token_unpermute(permuted.sin(), where, probs)

    with ascend.limits("ignore"):
        assert torch.autograd.gradcheck(run, (tokens, probs))


# Grouped products.

GROUPS = torch.tensor([3, 0, 4, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [0, 1])
def test_grouped_matmul(kind: int, dtype: torch.dtype, device: str) -> None:
    groups = GROUPS if kind else GROUPS.cumsum(0)
    x, weight = randn(8, 6, dtype=dtype), randn(4, 6, 5, dtype=dtype)
    more = {"group_list": groups, "group_list_type": kind, "split_item": 2, "group_type": 0}
    check("npu_grouped_matmul", device, [x], [weight], **more)
    check("npu_grouped_matmul", device, [x], list(weight), bias=list(randn(4, 5)), **more)
    check("npu_grouped_matmul", device, [x], [weight.transpose(1, 2).contiguous().transpose(1, 2)], **more)
    check("npu_grouped_matmul", device, list(x.split(GROUPS.tolist())), list(weight), **more)
    check("npu_grouped_matmul", device, [x, x[:2]], [weight[0], weight[1]], group_type=-1)
    check("npu_grouped_matmul", device, [x], [weight], output_dtype=torch.float32, **more)


def test_grouped_matmul_of_a_gradient() -> None:
    """group_type 2 is the gradient of the weight."""
    x, weight, upstream = randn(8, 6), randn(4, 6, 5).requires_grad_(), randn(8, 5)
    parts = [rows @ weight[e] for e, rows in enumerate(x.split(GROUPS.tolist()))]
    (expected,) = torch.autograd.grad(torch.cat(parts), weight, upstream)
    more = {"group_list": GROUPS, "group_list_type": 1, "split_item": 3, "group_type": 2}
    (got,) = ascend.npu_grouped_matmul([x.t()], [upstream], **more)
    torch.testing.assert_close(got, expected)
    close(got, KERNELS["npu_grouped_matmul"]([x.t()], [upstream], **more)[0])


@pytest.mark.parametrize("mode", [0, 2])
def test_the_chain_is_our_experts(mode: int) -> None:
    """Gating, routing, two products with SwiGLU between, and the weighted sum, as code for Ascend writes them."""
    x, gate_up, down, logits = randn(9, 16), randn(6, 24, 16), randn(6, 16, 12), randn(9, 6)
    weights, ids, _ = ascend.npu_moe_gating_top_k_softmax(logits, k=2)
    rows, where, counts, _ = ascend.npu_moe_init_routing_v2(
        x, ids, expert_num=6, expert_tokens_num_type=1, expert_tokens_num_flag=True
    )
    more = {"group_list": counts, "group_list_type": 1, "split_item": 2, "group_type": 0}
    (both,) = ascend.npu_grouped_matmul([rows], [gate_up.transpose(1, 2)], **more)
    (out_rows,) = ascend.npu_grouped_matmul([ascend.npu_swiglu(both)], [down.transpose(1, 2)], **more)
    index = where.view(9, 2).t().reshape(-1) if mode == 0 else where
    y = ascend.npu_moe_finalize_routing(out_rows, None, None, None, weights, index, None, mode)
    expected = ops.experts(x, gate_up, down, *ops.route(logits, 2, renormalize=False))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


# Quantisation.


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dynamic_quant(dtype: torch.dtype, device: str) -> None:
    x = randn(3, 4, 32, dtype=dtype)
    check("npu_dynamic_quant", device, x)
    check("npu_dynamic_quant", device, x, dst_type=torch.int8)
    check("npu_dynamic_quant", device, x, dst_type=torch.quint4x2)
    check("npu_dynamic_quant", device, x, dst_type=16)  # its number
    assert not ascend.npu_dynamic_quant(torch.zeros_like(x), dst_type=torch.quint4x2)[0].any()
    smooth = torch.rand(3, 32, dtype=dtype) + 0.5
    for scales, index, each in ((smooth[0], None, smooth[0].float()), (smooth, [2, 2, 12], None)):
        groups = None if index is None else torch.tensor(index, dtype=torch.int32)
        expected = x.float() * (smooth.float()[[0] * 2 + [2] * 10].view(x.shape) if each is None else each)
        got = ascend.npu_dynamic_quant(x.to(device), smooth_scales=scales.to(device), group_index=moved(groups, device))
        close(moved(got, "cpu"), KERNELS["npu_dynamic_quant"](expected))


# Errors.


def attention(*shape: int, **keywords: Any) -> Any:
    x = randn(*(shape or (1, 3, 2, 16)), dtype=HALF)
    return ascend.npu_fused_infer_attention_score(x, x, x, **{"num_heads": 2, "input_layout": "BSND"} | keywords)


def routing(ids: Tensor, **keywords: Any) -> Any:
    counts = {"expert_tokens_num_flag": True, "expert_tokens_num_type": 1}
    return ascend.npu_moe_init_routing_v2(randn(4, 6), ids, **{"expert_num": 5} | counts | keywords)


IDS = torch.tensor([[0, 1], [1, 2], [4, 3], [2, 0]], dtype=torch.int32)

BEYOND: dict[str, tuple[Callable[[], Any], str]] = {
    "npu_fused_infer_attention_score": (lambda: attention(1, 3, 2, 24), "multiple of 16"),
    "npu_moe_gating_top_k_softmax": (lambda: ascend.npu_moe_gating_top_k_softmax(randn(2, 4).double()), "float64"),
    "npu_moe_gating_top_k": (lambda: ascend.npu_moe_gating_top_k(randn(2, 4), 1, group_count=2), "more than two"),
    "npu_moe_init_routing_v2": (lambda: routing(IDS.long()), "int32, got int64"),
    "npu_moe_finalize_routing": (
        lambda: ascend.npu_moe_finalize_routing(
            randn(4, 6, dtype=HALF), None, None, None, randn(4, 1), torch.arange(4).int(), None
        ),
        "rows' dtype bfloat16, got float32",
    ),
    "npu_grouped_matmul": (
        lambda: ascend.npu_grouped_matmul([randn(3, 2)], [randn(2, 2)], group_type=-1, split_item=2),
        "needs split_item 0 or 1",
    ),
    "npu_moe_token_permute": (lambda: ascend.npu_moe_token_permute(randn(1, 2), IDS.view(1, -1).repeat(1, 80)), "512"),
    "npu_moe_token_unpermute": (
        lambda: ascend.npu_moe_token_unpermute(randn(4, 2).double(), torch.arange(4)),
        "got float64",
    ),
    "npu_dynamic_quant": (lambda: ascend.npu_dynamic_quant(randn(2, 8)), "got float32"),
}


def test_a_formula_refuses_what_it_does_not_look_at() -> None:
    """Or it would agree with a call that it does not compute."""
    x = randn(2, 8)
    with pytest.raises(AssertionError, match=r"npu_moe_gating_top_k: input_ids=.* is not looked at"):
        KERNELS["npu_moe_gating_top_k"](x, 2, input_ids=torch.zeros(2))
    with pytest.raises(TypeError, match="groups"):
        KERNELS["npu_moe_gating_top_k"](x, 2, groups=2)


def test_every_name_has_a_limit() -> None:
    elsewhere = {contract.name for contract in SPARSE}  # test_ascend_sparse.py
    assert {*FIRST_BEYOND, *BEYOND, *DELTA_BEYOND, *elsewhere, "limits"} == set(ascend.__all__)


@pytest.mark.parametrize("name", BEYOND)
def test_a_limit_is_an_error_until_it_is_lifted(name: str) -> None:
    judge_limit(name, *BEYOND[name])


LOST: dict[str, Callable[[Tensor], Any]] = {
    "npu_fused_infer_attention_score": lambda x: ascend.npu_fused_infer_attention_score(
        x.view(1, 1, 1, 32), *[randn(1, 4, 1, 32, dtype=HALF)] * 2, input_layout="BSND"
    ),
    "npu_moe_init_routing_v2": lambda x: ascend.npu_moe_init_routing_v2(
        x, IDS[:1], expert_num=5, expert_tokens_num_flag=True, expert_tokens_num_type=1
    ),
    "npu_moe_finalize_routing": lambda x: ascend.npu_moe_finalize_routing(
        x, None, None, None, None, torch.zeros(1).int(), None
    ),
    "npu_grouped_matmul": lambda x: ascend.npu_grouped_matmul([x], [randn(32, 2, dtype=HALF)], group_type=-1),
    "npu_dynamic_quant": lambda x: ascend.npu_dynamic_quant(x),
}


@pytest.mark.parametrize("name", [*LOST, "npu_moe_gating_top_k_softmax"])
def test_a_gradient_that_torch_npu_lacks_is_an_error(name: str) -> None:
    x = randn(1, 32, dtype=HALF).requires_grad_()
    call = LOST.get(name, ascend.npu_moe_gating_top_k_softmax)
    says = "drops it silently" if name in LOST else "has none"
    with pytest.raises(RuntimeError, match=f"{name}: a gradient is needed and torch_npu {says}"):
        call(x)
    with torch.no_grad():
        call(x)


NONSENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "quantised keys": (lambda: attention(key_antiquant_scale=randn(2)), "key_antiquant_scale is implemented on an NPU"),
    "mode of quantisation": (lambda: attention(antiquant_mode=1), "antiquant_mode=1 is implemented"),
    "rope": (lambda: attention(query_rope=randn(1, 3, 2, 64), key_rope=randn(1, 3, 2, 64)), "query_rope, key_rope"),
    "attention layout": (lambda: attention(input_layout="NTD"), "input_layout is 'NTD'"),
    "packed without lengths": (lambda: attention(3, 2, 128, input_layout="TND"), "TND needs actual_seq_lengths"),
    "pages without lengths": (
        lambda: attention(block_table=torch.zeros(1, 1, dtype=torch.int32), block_size=128),
        "block_table needs actual_seq_lengths_kv",
    ),
    "sparse_mode": (lambda: attention(sparse_mode=9), "sparse_mode is 9"),
    "heads": (lambda: attention(1, 3, 3, 16, num_heads=3, num_key_value_heads=2), "multiple of 2 key heads"),
    "hash routing": (lambda: ascend.npu_moe_gating_top_k(randn(2, 8), 1, input_ids=IDS[0], tid2eid=IDS), "tid2eid"),
    "k": (lambda: ascend.npu_moe_gating_top_k(randn(2, 8), 5, group_count=2), "do not fit"),
    "norm_type": (lambda: ascend.npu_moe_gating_top_k(randn(2, 8), 1, norm_type=2), "norm_type is 2"),
    "drop": (lambda: routing(IDS, drop_pad_mode=2), "drop_pad_mode is 2, expected 0 or 1"),
    "quant_mode": (lambda: routing(IDS, quant_mode=3), r"quant_mode is 3, expected -1 \(none\), 0 \(static\) or 1"),
    "given scale": (lambda: routing(IDS, quant_mode=0, scale=randn(1)), "needs scale and offset"),
    "experts": (lambda: routing(IDS, expert_num=-1), "expert_num is -1"),
    "rows and ids": (lambda: routing(IDS[:3]), "expert_idx"),
    "quantised product": (
        lambda: ascend.npu_grouped_matmul([randn(3, 2)], [randn(2, 2)], group_type=-1, scale=[randn(2)]),
        "scale is implemented",
    ),
    "group lengths": (
        lambda: ascend.npu_grouped_matmul(
            [randn(3, 2)], [randn(2, 2, 2)], group_type=0, split_item=2, group_list=torch.tensor([1, 2])
        ),
        "add up to 3",
    ),
    "padded": (lambda: ascend.npu_moe_token_permute(randn(4, 6), IDS, padded_mode=True), "padded_mode=True"),
    "quant type": (lambda: ascend.npu_dynamic_quant(randn(2, 8), dst_type=290), "dst_type is 290"),
    "row of int4": (lambda: ascend.npu_dynamic_quant(randn(2, 12), dst_type=torch.quint4x2), "multiple of 8"),
    "head sizes": (
        lambda: ascend.npu_fused_infer_attention_score(
            *[randn(1, 3, 2, 16), randn(1, 3, 2, 32), randn(1, 3, 2, 32)], num_heads=2, input_layout="BSND"
        ),
        "query has heads of 16, key of 32",
    ),
    "per channel": (lambda: ascend.npu_dynamic_quant(randn(2, 8), quant_mode="perchannel"), "perchannel"),
    "smooth": (lambda: ascend.npu_dynamic_quant(randn(2, 8), smooth_scales=randn(4)), "smooth_scales"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_stays_an_error_without_limits(name: str) -> None:
    call, says = NONSENSE[name]
    with ascend.limits("ignore"), pytest.raises(ValueError, match=says):
        call()
