"""Mixture of experts in training: blocks of Hugging Face's models with their gradients, torch's own grouped product,
properties of the shuffles, errors, and faults planted in the kernels."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import Fault, first_red, one_of_each_quick, plant
from test_ops import DEVICE, assert_close, num_rows
from torch import Tensor

from whorl.ops import OPS, glu, grouped_matmul, permute, route, unpermute

BACKENDS = ["torch", "triton"]


def moe(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, k: int, backend: str, **how: Any) -> Tensor:
    """The routed experts of a block, by our operators: as short as a user would write it."""
    weights, ids = route(logits, k, backend=backend, **how)
    rows, places, counts = permute(x, ids, gate_up.shape[0], backend=backend)
    hidden = glu(grouped_matmul(rows, gate_up, counts, backend=backend), backend=backend)
    return unpermute(grouped_matmul(hidden, down, counts, backend=backend), places, weights, backend=backend)


# ---- Hugging Face's blocks


def qwen3() -> torch.nn.Module:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 24, "moe_intermediate_size": 20, "num_experts": 12, "num_experts_per_tok": 3}
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, norm_topk_prob=True))


DEEPSEEK = {
    "hidden_size": 24,
    "moe_intermediate_size": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def deepseek_v3() -> torch.nn.Module:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    return DeepseekV3MoE(DeepseekV3Config(**DEEPSEEK))


def deepseek_v32() -> torch.nn.Module:
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32MoE

    return DeepseekV32MoE(DeepseekV32Config(**DEEPSEEK))


def ours(block: torch.nn.Module, x: Tensor, backend: str) -> Tensor:
    rows, gate, experts = x.flatten(0, 1), block.gate, block.experts
    logits = F.linear(rows, gate.weight)
    if not hasattr(gate, "e_score_correction_bias"):
        return moe(rows, logits, experts.gate_up_proj, experts.down_proj, 3, backend).view(x.shape)
    how = {"bias": gate.e_score_correction_bias, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
    routed = moe(rows, logits, experts.gate_up_proj, experts.down_proj, 4, backend, **how)
    return routed.view(x.shape) + block.shared_experts(x)


BLOCKS = [
    pytest.param(make, backend, marks=[pytest.mark.slow] if backend == "triton" else [])
    for make in (qwen3, deepseek_v3, deepseek_v32)
    for backend in BACKENDS
]


@pytest.mark.parametrize(("make", "backend"), BLOCKS)
def test_blocks_of_transformers(make: Any, backend: str) -> None:
    """Output and the gradients of the input and of every parameter."""
    block = make().to(DEVICE)
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "gate.weight" in name else 0.2)
    if hasattr(block.gate, "e_score_correction_bias"):
        block.gate.e_score_correction_bias.copy_(torch.rand(16) / 4)
    x = torch.randn(2, 7, 24, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    leaves = {"x": x, **dict(block.named_parameters())}
    results = []
    for y in (ours(block, x, backend), block(x)):
        results.append([y, *torch.autograd.grad(y, list(leaves.values()), dy)])
    for what, got, expected in zip(["y", *leaves], *results, strict=True):
        assert expected.abs().max() > 0, f"{what} proves nothing"
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")


def test_a_compiled_block_has_no_break() -> None:
    """Nothing is read back to the host: counts stay on the device, shapes do not depend on the choice."""
    shapes = ((6, 16), (6, 5), (5, 24, 16), (5, 16, 12))
    leaves = [torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in shapes]
    results = []
    for function in (moe, torch.compile(moe, backend="aot_eager", fullgraph=True)):
        y = function(*leaves, 2, "")
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


# ---- torch's grouped product

COUNTS = [[3, 0, 5, 1, 0], [0, 0, 0, 0, 9], [9, 0, 0, 0, 0], [1, 2, 3, 2, 1]]


@pytest.mark.parametrize(
    ("counts", "backend"),
    [
        pytest.param(
            counts,
            backend,
            marks=[pytest.mark.slow] if backend == "triton" and counts != COUNTS[0] else [],
            id=f"{counts}-{backend}",
        )
        for counts in COUNTS
        for backend in BACKENDS
    ],
)
def test_is_torchs_grouped_product(counts: list[int], backend: str) -> None:
    x, weight, dy = (torch.randn(*shape, device=DEVICE).bfloat16().float() for shape in ((9, 16), (5, 24, 16), (9, 24)))
    sizes = torch.tensor(counts, device=DEVICE)
    ends = sizes.cumsum(0).int()
    got = grouped_matmul(x, weight, sizes, backend=backend)
    expected = F.grouped_mm(x.bfloat16(), weight.bfloat16().transpose(1, 2), offs=ends)
    torch.testing.assert_close(got.bfloat16(), expected, rtol=2**-7, atol=1e-3)
    leaves = [t.bfloat16().requires_grad_() for t in (x, weight)]
    mine = [t.clone().requires_grad_() for t in (x, weight)]
    grads = torch.autograd.grad(F.grouped_mm(leaves[0], leaves[1].transpose(1, 2), offs=ends), leaves, dy.bfloat16())
    for g, e in zip(torch.autograd.grad(grouped_matmul(*mine, sizes, backend=backend), mine, dy), grads, strict=True):
        torch.testing.assert_close(g.bfloat16(), e, rtol=2**-6, atol=1e-3)
    empty = [i for i, n in enumerate(counts) if not n]
    dweight = torch.autograd.grad(grouped_matmul(*mine, sizes, backend=backend), mine[1], dy)[0]
    assert not empty or not dweight[empty].any()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_torchs_product_behind_our_contract(counts: list[int]) -> None:
    """The backend torch_cuda, which torch runs on a CPU too."""
    op, backward = OPS["grouped_matmul"], OPS["grouped_matmul_backward"]
    values = {
        "x": torch.randn(9, 16, device=DEVICE).bfloat16(),
        "weight": torch.randn(5, 24, 16, device=DEVICE).bfloat16(),
        "counts": torch.tensor(counts, device=DEVICE, dtype=torch.int32),
    }
    more = {"dy": torch.randn(9, 24, device=DEVICE).bfloat16(), **values}
    for which, arguments in ((op, values), (backward, more)):
        wide = {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}
        answers = [
            which.impls["torch_cuda"].function(**arguments),
            which.reference(**arguments),
            which.reference(**wide),
        ]
        assert_close(*(list(a) if isinstance(a, tuple) else [a] for a in answers))


def test_torchs_product_is_taken_where_its_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["whorl.ops.moe.grouped_matmul"]
    monkeypatch.setattr(module, "compute_capability", lambda _: (9, 0))
    accepts = grouped_matmul.impls["torch_cuda"].accepts
    x, weight, counts = torch.randn(9, 16).bfloat16(), torch.randn(5, 24, 16).bfloat16(), torch.tensor(COUNTS[0])
    assert next(iter(grouped_matmul.impls)) == "torch_cuda"
    assert accepts(x=x, weight=weight, counts=counts) is None
    assert "bf16" in accepts(x=x.float(), weight=weight.float(), counts=counts)
    assert "multiples of 8" in accepts(x=x, weight=weight[:, :20], counts=counts)
    monkeypatch.setattr(module, "compute_capability", lambda _: (8, 0))
    assert "Hopper" in accepts(x=x, weight=weight, counts=counts)


@pytest.mark.parametrize(("rows", "experts", "is_slower"), [(4096, 8, False), (4096, 64, True), (5, 8, True)])
def test_the_faster_product_is_chosen_as_measured(rows: int, experts: int, is_slower: bool) -> None:
    x, weight = torch.empty(rows, 8, device="meta"), torch.empty(experts, 8, 8, device="meta")
    forward, backward = grouped_matmul.impls["torch_cuda"], OPS["grouped_matmul_backward"].impls["torch_cuda"]
    reason = forward.slower(x=x, weight=weight)
    assert (reason is not None) == is_slower
    assert reason is None or "the Triton kernel is faster at about 64 rows per expert" in reason
    assert backward.slower(x=x, weight=weight) is None


# ---- the shuffles


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_lie_by_expert_and_then_by_token(backend: str) -> None:
    ids = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 0]], device=DEVICE)
    x = torch.arange(4.0, device=DEVICE)[:, None].expand(4, 8)
    rows, places, counts = permute(x, ids, 5, backend=backend)
    assert rows[:, 0].tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    assert places.tolist() == [[3, 0], [1, 6], [7, 4], [5, 2]]
    assert counts.tolist() == [3, 0, 3, 2, 0]
    assert (places.dtype, counts.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_and_back(backend: str) -> None:
    x, probs = torch.randn(9, 40, device=DEVICE), torch.rand(9, 3, device=DEVICE)
    ids = torch.rand(9, 6, device=DEVICE).argsort(-1)[:, :3]
    rows, places, _ = permute(x, ids, 6, backend=backend)
    torch.testing.assert_close(unpermute(rows, places, backend=backend), 3 * x)
    back = unpermute(rows, places, probs, backend=backend)
    torch.testing.assert_close(back, probs.sum(-1, keepdim=True) * x)
    weighted, places, _ = permute(x, ids, 6, probs, backend=backend)
    torch.testing.assert_close(unpermute(weighted, places, backend=backend), back)
    # Spreading and collecting are each other's transpose.
    z = torch.randn_like(rows)
    torch.testing.assert_close((weighted * z).sum(), (x * unpermute(z, places, probs, backend=backend)).sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_what_torch_npu_calls_permute(backend: str) -> None:
    from whorl import ascend

    x, ids = torch.randn(5, 16, device=DEVICE), torch.rand(5, 7, device=DEVICE).argsort(-1)[:, :3]
    rows, places, _ = permute(x, ids, 7, backend=backend)
    expected = ascend.npu_moe_token_permute(x, ids)
    assert torch.equal(rows, expected[0])
    assert torch.equal(places.flatten(), expected[1])


def test_many_pairs_are_sorted_in_blocks() -> None:
    """More pairs than the kernel looks at together."""
    ids = torch.randint(0, 3, (4200, 2), device=DEVICE)
    got = permute(torch.ones(4200, 1, device=DEVICE), ids, 3, backend="triton" if DEVICE == "cuda" else "torch")
    module = sys.modules["whorl.ops.moe.permute_triton"]
    places, counts = torch.empty_like(ids, dtype=torch.int32), torch.empty(3, dtype=torch.int32, device=DEVICE)
    module._places_kernel[(3,)](ids, places, counts, ids.numel(), BLOCK_P=4096)
    assert torch.equal(places, got[1])
    assert torch.equal(counts, got[2])


# ---- routing


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_renormalised_weights_have_no_sum_to_change(scoring: str, backend: str) -> None:
    logits = torch.randn(5, 12, device=DEVICE, requires_grad=True)
    weights, _ = route(logits, 4, scoring=scoring, backend=backend)
    assert not torch.autograd.grad(weights.sum(), logits)[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_underflow_have_finite_gradients(backend: str) -> None:
    logits = torch.tensor([[-200.0, -200.0, -300.0], [90.0, -90.0, 0.0]], device=DEVICE, requires_grad=True)
    for scoring in ("sigmoid", "softmax"):
        weights, ids = route(logits, 2, scoring=scoring, backend=backend)
        assert not ids.requires_grad
        (grad,) = torch.autograd.grad(weights.sum(), logits)
        assert grad.isfinite().all()


def test_the_bias_gets_no_gradient() -> None:
    bias = torch.zeros(4, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match=r"route: bias requires a gradient, .* pass bias\.detach\(\)"):
        route(torch.randn(2, 4, device=DEVICE), 2, bias)


# ---- errors

X, IDS = torch.randn(4, 8), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])
ERRORS: dict[str, tuple[Any, str]] = {
    "id too high": (lambda: permute(X, IDS, 2), r"permute: ids has values from 0 to 2, expected 0 to 1"),
    "flat ids": (lambda: permute(X, IDS[:, 0], 3), r"permute: ids is \[4\] torch.int64, expected \[4, K > 0\]"),
    "no experts": (lambda: permute(X, IDS, 0), "num_experts is 0"),
    "other tokens": (lambda: permute(X[:3], IDS, 3), r"ids is \[4, 2\] torch.int64, expected \[3, K > 0\]"),
    "probs of one choice": (
        lambda: permute(X, IDS, 3, X[:, :1]),
        r"probs is \[4, 1\] torch.float32, expected \[4, 2\]",
    ),
    "integers": (lambda: permute(X.int(), IDS, 3), r"x is \[4, 8\] torch.int32, expected \[4, 8\] floating point"),
    "rows missing": (
        lambda: unpermute(X, torch.zeros(4, 2).int()),
        r"unpermute: rows is \[4, 8\] torch.float32, expected \[8, 8\]",
    ),
    "place too high": (
        lambda: unpermute(X, torch.tensor([[0, 4], [1, 2]])),
        "places has values from 0 to 4, expected 0 to 3",
    ),
    "weight as [E, C, F]": (
        lambda: grouped_matmul(X, torch.randn(2, 8, 6), torch.tensor([1, 3])),
        r"expected \[2, F, 8\] torch.float32; pass a weight stored as \[E, C, F\] as weight.transpose\(1, 2\)",
    ),
    "rows not counted": (
        lambda: grouped_matmul(X, torch.randn(2, 6, 8), torch.tensor([1, 2])),
        r"counts are \[1, 2\], expected a sum of 4 rows",
    ),
    "negative count": (
        lambda: grouped_matmul(X, torch.randn(2, 6, 8), torch.tensor([-1, 5])),
        "counts has values from -1 to 5, expected 0 or more",
    ),
    "another dtype": (lambda: grouped_matmul(X, torch.randn(2, 6, 8).half(), torch.tensor([1, 3])), "torch.float16"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


# ---- faults

PERMUTE, GROUPED = "whorl.ops.moe.permute_triton", "whorl.ops.moe.grouped_matmul_triton"
ROUTE = "whorl.ops.moe.route_triton"
CUMSUM = "tl.cumsum(is_mine.to(tl.int32), 0)"
CHOICES = "where(experts == expert, tl.sum(tl.where(choices"
FAULTS = [
    Fault("last token first", PERMUTE, "permute", f"{CUMSUM} - 1", f"tl.sum(is_mine.to(tl.int32), 0) - {CUMSUM}"),
    # Not "<=": rows behind their own would lie past the end, and an interpreted kernel writes there.
    Fault("last expert first", PERMUTE, "permute", "other=expert) < expert", "other=expert) > expert"),
    Fault("rows not weighted", PERMUTE, "permute", "row = x.to(tl.float32) * tl.", "row = x.to(tl.float32) + 0 * tl."),
    Fault("only the last choice", PERMUTE, "unpermute", "y += row", "y = row"),
    Fault("choices not weighted", PERMUTE, "unpermute", "row *= tl.load(probs", "row *= 1 + 0 * tl.load(probs"),
    Fault("only the last channels", PERMUTE, "unpermute_backward", "total += tl.load(", "total = tl.load("),
    Fault(
        "probs of the first choice", PERMUTE, "unpermute_backward", "place[:, None] * rows", "tl.min(place, 0) * rows"
    ),
    Fault("gradient not added up", PERMUTE, "permute_backward", "y += row", "y = row"),
    Fault("first expert's weight", GROUPED, "grouped_matmul", "expert.to(tl.int64) * stride_e", "0 * stride_e"),
    Fault("last row lost", GROUPED, "grouped_matmul", "rows < end, columns", "rows < end - 1, columns"),
    Fault("only the last sums", GROUPED, "grouped_matmul", "dot(x, weight, y,", "dot(x, weight, 0 * y,"),
    Fault("tiles of one group", GROUPED, "grouped_matmul", "0), 0), group * GROUP + offset", "0), 0), offset"),
    Fault("rows of the next expert", GROUPED, "grouped_matmul_backward", "(index < expert, c", "(index <= expert, c"),
    Fault("only the last rows", GROUPED, "grouped_matmul_backward", "dot(dy, x, dweight,", "dot(dy, x, 0 * dweight,"),
    Fault("sum not taken out", ROUTE, "route_backward", "tl.where(chosen_total >= 1e-20, differences, grads)", "grads"),
    Fault("softmax not taken out", ROUTE, "route_backward", "scores * (dscores - inner)", "scores * dscores"),
    Fault("scale forgotten", ROUTE, "route_backward", "other=0.0).to(tl.float32) * scale", "other=0.0).to(tl.float32)"),
    Fault("first choice everywhere", ROUTE, "route_backward", f"{CHOICES} == choice", f"{CHOICES} == 0"),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="groups of these cases are longer than the interpreter's tiles only")
@pytest.mark.parametrize("fault", one_of_each_quick(FAULTS))
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault.module, fault.old, fault.new, fault.count, tmp_path, monkeypatch)
    cases = sorted(OPS[fault.op].cases, key=num_rows)
    assert first_red(OPS[fault.op], cases) is not None, f"no case of {fault.op} notices: {fault.name}"


# ---- sizes past 2^31 elements


@pytest.mark.gpu
def test_the_last_of_many_choices() -> None:
    logits = torch.randn(2**24 + 40, 128, device=DEVICE, dtype=torch.bfloat16)
    weights, ids = route(logits, 8, backend="triton")
    expected = route(logits[-64:].clone(), 8, backend="triton")
    assert torch.equal(weights[-64:], expected[0])
    assert torch.equal(ids[-64:], expected[1])
    grad = OPS["route_backward"](weights, logits, ids, backend="triton")[-64:]
    assert torch.equal(grad, OPS["route_backward"](expected[0], logits[-64:].clone(), expected[1], backend="triton"))


@pytest.mark.gpu
def test_the_last_of_many_rows() -> None:
    """2^31 elements of rows, and more than that of weights: the last token's, forward and backward."""
    count, channels = 2**17 + 40, 2048
    x = torch.randn(count, channels, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], device=DEVICE).expand(count, 8)
    rows, places, counts = permute(x, ids, 8, backend="triton")
    assert rows.numel() > 2**31
    assert torch.equal(rows[-1], x[-1])
    assert places[-1].tolist() == [count * (i + 1) - 1 for i in range(8)]
    torch.testing.assert_close(unpermute(rows, places, backend="triton")[-1], (8 * x[-1].float()).bfloat16())
    drows, dprobs = OPS["unpermute_backward"](x, rows, places, torch.ones_like(ids).float(), backend="triton")
    assert torch.equal(drows[-1], x[-1])
    torch.testing.assert_close(dprobs[-1], x[-1].float().square().sum().expand(8), rtol=1e-4, atol=0)
    weight = torch.randn(8, 16, channels, device=DEVICE, dtype=torch.bfloat16)
    y = grouped_matmul(rows, weight, counts, backend="triton")
    torch.testing.assert_close(y[-1], (weight[-1].float() @ x[-1].float()).bfloat16(), rtol=2**-7, atol=0.1)
    dx, _ = OPS["grouped_matmul_backward"](y, rows, weight, counts, backend="triton")
    torch.testing.assert_close(dx[-1], (y[-1].float() @ weight[-1].float()).bfloat16(), rtol=2**-6, atol=1.0)
