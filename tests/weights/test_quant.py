"""Per-token quantisation: against torch's own decomposed quantisation, and its promises one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers torch.ops.quantized_decomposed

from whorl.ops import dequantize, dynamic_quant

BACKENDS = ("torch", "triton")
FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
TINY, HUGE = 2.0**-149, 2.0**127


def test_agrees_with_torchs_decomposed_quantisation() -> None:
    x = torch.randn(64, 257).bfloat16().float()  # bf16: the same ratios come up again and again, ties among them
    q, scale = dynamic_quant(x)
    theirs, zero = torch.ops.quantized_decomposed.choose_qparams_per_token(x, torch.int8)
    torch.testing.assert_close(scale, theirs.squeeze(-1), rtol=1e-6, atol=0)
    codes = torch.ops.quantized_decomposed.quantize_per_token(x, theirs, zero, -127, 127, torch.int8)
    # They multiply by the reciprocal: of two equally near codes they may take the other.
    wrong = q != codes
    assert ((x / scale[:, None]).frac().abs()[wrong] - 0.5).abs().lt(1e-4).all()
    assert wrong.sum() < 0.002 * x.numel()


def test_fp8_agrees_with_torchs_cast() -> None:
    x = 5 * torch.randn(32, 100)
    q, scale = dynamic_quant(x, format="fp8")
    expected = (x / (x.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, x.abs().amax(-1) / 448)


@given(
    rows=st.lists(st.lists(st.floats(-HUGE, HUGE, width=32), min_size=3, max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=100, deadline=None)
def test_an_element_is_at_most_half_a_step_off(rows: list[list[float]], dtype: torch.dtype) -> None:
    x = torch.tensor(rows).to(dtype)
    x = torch.where(x.isfinite(), x, 0)
    q, scale = dynamic_quant(x)
    off = (x.double() - q.double() * scale.double()[:, None]).abs()
    # 127 subnormal steps: what a scale that has lost its last bits can be off by
    assert (off <= scale.double()[:, None] * (0.5 + 1e-4) + 127 * TINY).all()
    assert q.abs().max() <= 127
    coarse, scale = dynamic_quant(x, format="fp8")
    off = (x.double() - coarse.double() * scale.double()[:, None]).abs()
    assert (off <= x.double().abs() / 16 * (1 + 1e-4) + scale.double()[:, None] * 2.0**-9 + 448 * TINY).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_rows(format: str, backend: str, device: str) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[0.0, -0.0], [TINY, -TINY], [HUGE, -HUGE], [inf, 1.0], [nan, 1.0], [-inf, nan], [1.0, -1.0]])
    q, scale = dynamic_quant(x.to(device), format=format, backend=backend)
    largest = FORMATS[format][1]
    zeros = torch.zeros(2, device=device)
    assert q.dtype == FORMATS[format][0]
    assert q.float().isfinite().all()
    for dtype in (torch.float32, torch.bfloat16):
        back = dequantize(q, scale, dtype, backend=backend)
        assert torch.equal(back[0].float(), zeros)
        assert torch.equal(back[1].float(), zeros)
        assert back[3:6].isnan().all()
        assert not back[[0, 1, 2, 6]].isnan().any()
    assert scale[:2].tolist() == [0, 0]
    assert scale[3] == inf
    assert scale[4:6].isnan().all()
    assert q[6].tolist() == [largest, -largest]
    assert q[2].tolist() == [largest, -largest]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_even(backend: str, device: str) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]])
    q, scale = dynamic_quant(x.to(device), backend=backend)
    assert scale.tolist() == [1.0]
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, 126, -126]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_depends_on_itself_alone(format: str, backend: str, device: str) -> None:
    x = torch.randn(9, 130, device=device)
    q, scale = dynamic_quant(x, format=format, backend=backend)
    for row in (0, 4, 8):
        alone = dynamic_quant(x[row], format=format, backend=backend)
        assert torch.equal(alone[0].view(torch.uint8), q[row].view(torch.uint8))
        assert torch.equal(alone[1], scale[row])


def test_one_node_each_in_a_graph() -> None:
    targets: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        targets.extend(n.target for n in module.graph.nodes if n.op == "call_function")
        return module

    x = torch.randn(5, 32)

    def function(x: torch.Tensor) -> torch.Tensor:
        return dequantize(*dynamic_quant(x), torch.bfloat16)

    assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(x), function(x))
    assert targets.count(dynamic_quant.node) == targets.count(dequantize.node) == 1


def test_sharded_by_tokens() -> None:
    sharding = dynamic_quant.sharding
    assert sharding is not None
    shardings = sharding({"x": torch.empty(2, 3, 4), "format": "int8"})
    assert [str(places[0]) for places, _ in shardings] == [
        "R",
        "S(0)",
        "S(1)",
    ]  # never the channels: a row has one scale


QUANTIZED = dynamic_quant.reference(torch.randn(4, 8))
WRONG = {
    "integers": (
        lambda: dynamic_quant(torch.ones(2, 2, dtype=torch.int32)),
        r"x is \[2, 2\] torch\.int32, expected .* floating point",
    ),
    "fp8 in": (lambda: dynamic_quant(torch.ones(2, 2).to(torch.float8_e4m3fn)), r"x is \[2, 2\] torch\.float8_e4m3fn"),
    "no channels": (
        lambda: dynamic_quant(torch.ones(2, 0)),
        r"x is \[2, 0\] torch\.float32, expected \[\.\.\., C > 0\]",
    ),
    "format": (lambda: dynamic_quant(torch.ones(2, 2), format="int4"), r"format is 'int4', expected one of int8, fp8"),
    "codes": (
        lambda: dequantize(torch.ones(2, 2), torch.ones(2), torch.float32),
        r"q is \[2, 2\] torch\.float32, expected .* torch\.int8 or torch\.float8_e4m3fn",
    ),
    "scale": (lambda: dequantize(QUANTIZED[0], QUANTIZED[1][:3], torch.float32), r"scale is \[3\] .* expected \[4\]"),
    "dtype": (lambda: dequantize(*QUANTIZED, torch.int32), r"dtype is torch\.int32, expected bf16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_no_gradient() -> None:
    with pytest.raises(RuntimeError, match="no gradient"):
        dynamic_quant(torch.randn(2, 4, requires_grad=True))


def test_rows_too_long_for_the_kernel_are_refused_with_the_reason(device: str) -> None:
    with pytest.raises(RuntimeError, match="rows of up to 32768 channels, got 40000"):
        dynamic_quant(torch.ones(1, 40000, device=device), backend="triton")
