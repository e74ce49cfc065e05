"""The CPU kernels: packed products against the gguf package and fp64, and the same bits however they are computed."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from whorl import ops
from whorl.ops.cpu import library
from whorl.ops.cpu.linear import linear
from whorl.ops.cpu.moe import run_experts
from whorl.ops.cpu.packed import KINDS, PackedMatrix, PackedStack, interleave
from whorl.ops.moe.routed import run_routed

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"CPU kernels: {library.missing()}")
VARIANTS = ("avx512", "avx2", "neon", "plain")
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of a block that hold fp16 numbers


def blocks_of(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks with every code, and their values as the gguf package unpacks them."""
    number = GGMLQuantizationType[kind]
    values, size = GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(seed)
    stored = generator.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for first in HALVES[kind]:
        scales = generator.normal(scale=0.02, size=stored.shape[:2]).astype(np.float16)
        stored[..., first : first + 2] = scales[..., None].view(np.uint8)
    flat = stored.reshape(rows, -1)
    return torch.from_numpy(flat), torch.from_numpy(dequantize(flat, number))


def matrix_of(kind: str, rows: int, columns: int, bits: Any = 16) -> tuple[PackedMatrix, Tensor]:
    stored, values = blocks_of(kind, rows, columns)
    return PackedMatrix([interleave(kind, stored, columns)], columns, bits), values


def rounded(x: Tensor, bits: int) -> Tensor:
    """Tokens as the kernels round them, in fp64."""
    blocks = x.unflatten(-1, (-1, 32))
    top = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * (127 / top)).round().double()
    left = blocks.double() * (127 / top).double() - codes
    codes = codes + (left * 254).round() / 254 if bits == 16 else codes
    return (codes * (top / 127).double()).flatten(1)


@pytest.fixture
def restored() -> Iterator[None]:
    before, threads = library.variant(), torch.get_num_threads()
    yield
    library.library().whorl_cpu_choose((before or "").encode())
    torch.set_num_threads(threads)
    library.use_threads()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_package(kind: str) -> None:
    matrix, values = matrix_of(kind, 37, 768)
    assert torch.equal(matrix.values(), values)
    picked = torch.tensor([36, 0, 17, 17])
    assert torch.equal(matrix.values(picked), values[picked])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("bits", [8, 16])
def test_products_are_those_of_rounded_tokens(kind: str, scale: float, bits: int) -> None:
    matrix, values = matrix_of(kind, 37, 512, bits)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)) * scale
    gold = rounded(x, bits) @ values.double().T
    bias = torch.randn(37)
    size = rounded(x, bits).abs() @ values.double().abs().T  # what errors are relative to
    exact = x.double() @ values.double().T
    assert float((gold - exact).norm() / exact.norm()) < {8: 0.02, 16: 1e-4}[bits]
    assert ((matrix.linear(x) - gold).abs() <= 1e-6 * size).all()
    assert torch.equal(matrix.linear(x, bias), matrix.linear(x) + bias)
    assert matrix.linear(x[:0]).shape == (0, 37)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_row_has_its_bits_with_any_rows_threads_and_instructions(kind: str, bits: int, restored: None) -> None:
    matrix, _ = matrix_of(kind, 300, 512, bits)
    x = torch.randn(23, 512, generator=torch.Generator().manual_seed(2))
    expected = matrix.linear(x)
    for name in VARIANTS:
        if not library.library().whorl_cpu_choose(name.encode()):
            continue
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(matrix.linear(x), expected), (name, threads)
        assert torch.equal(torch.cat([matrix.linear(row) for row in x.split(1)]), expected), name
        assert torch.equal(torch.cat([matrix.linear(part) for part in x.split(3)]), expected), name


def test_the_least_code_times_the_greatest() -> None:
    """-128 * 127 twice: a sum of two such products does not fit 16 bits, which one instruction saturates at."""
    stored = torch.zeros(16, 34, dtype=torch.uint8)
    stored[:, :2] = torch.tensor(np.array([1.0], np.float16).view(np.uint8))
    stored[:, 2:] = 128
    matrix = PackedMatrix([interleave("Q8_0", stored, 32)], 32)
    for sign in (1.0, -1.0):
        x = torch.full((1, 32), 127.0 * sign)
        assert (matrix.linear(x) == -128 * 127 * 32 * sign).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(broken: float) -> None:
    matrix, _ = matrix_of("Q4_1", 32, 64)
    x = torch.ones(2, 64)
    x[1, 40] = broken
    y = matrix.linear(x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


def test_mixed_types_and_rows_out_of_range() -> None:
    parts = [(kind, *blocks_of(kind, rows, 256, rows)) for kind, rows in (("Q4_K", 20), ("Q6_K", 7))]
    matrix = PackedMatrix([interleave(kind, stored, 256) for kind, stored, _ in parts], 256)
    x = torch.randn(3, 256)
    expected = [PackedMatrix([interleave(kind, stored, 256)], 256).linear(x) for kind, stored, _ in parts]
    assert torch.equal(matrix.linear(x), torch.cat(expected, 1))
    assert torch.equal(matrix.values(), torch.cat([values for *_, values in parts]))
    with pytest.raises(ValueError, match="rows from 0 to 27 of a matrix with 27"):
        matrix.values(torch.tensor([0, 27]))


def chosen(tokens: int, experts: int, per_token: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of a router's choices."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :per_token]
    return torch.rand(tokens, per_token, generator=generator), ids


# 19 tokens: experts have fewer and more than a group of 4; 600: more than are at hand at a time
@pytest.mark.parametrize("tokens", [0, 1, 19, 600])
def test_experts_are_their_products_one_by_one(tokens: int, restored: None) -> None:
    kinds = {"Q4_K": "Q4_1", "Q8_0": "Q5_0", "Q6_K": "Q8_0"}
    gate_up, down = (
        [matrix_of(kind, *size)[0] for kind in each]
        for each, size in ((kinds, (128, 256)), (kinds.values(), (256, 64)))
    )
    x, (weights, ids) = torch.randn(tokens, 256), chosen(tokens, 3, 2)
    expected = run_routed(x, weights, ids, lambda e, rows: down[e].linear(ops.glu(gate_up[e].linear(rows))))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(run_experts(PackedStack(gate_up), PackedStack(down), x, weights, ids), expected)


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_plain_weights_are_their_products_one_by_one(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    gate_up, down = torch.randn(4, 2 * 24, 40, dtype=dtype), torch.randn(4, 40, 24, dtype=dtype)
    x, (weights, ids) = torch.randn(tokens, 40), chosen(tokens, 4, 2)
    expected = run_routed(x, weights, ids, lambda e, rows: linear(ops.glu(linear(rows, gate_up[e])), down[e]))
    assert torch.equal(run_experts(gate_up, down, x, weights, ids), expected)
    cut = torch.cat(
        [run_experts(gate_up, down, *row) for row in zip(x.split(1), weights.split(1), ids.split(1), strict=True)]
    )
    assert torch.equal(cut, expected)


def test_a_number_that_is_none_ranks_first() -> None:
    """As torch.sort has it: a broken token must not look like a whole one."""
    logits = torch.tensor([[0.0, float("nan"), 3.0], [-float("inf"), 1.0, 1.0]])
    weights, ids = ops.route(logits, 2, scoring="sigmoid", renormalize=False, backend="cpp")
    assert ids.tolist() == [[1, 2], [1, 2]]
    assert weights[0, 0].isnan()


def test_an_expert_that_is_not_there_is_refused() -> None:
    stack = PackedStack([matrix_of("Q4_1", 64, 32)[0]])
    with pytest.raises(ValueError, match="experts from 0 to 1 of 1"):
        run_experts(stack, stack, torch.ones(1, 32), torch.ones(1, 2), torch.tensor([[0, 1]]))


def calls() -> dict[str, Any]:
    """One call of each operator, with sizes that no vector divides."""
    torch.manual_seed(3)
    x, weight = torch.randn(19, 70), torch.randn(33, 70)
    cases: dict[str, Any] = {
        "linear": lambda: ops.linear(x, weight),
        "linear of 16 bits": lambda: ops.linear(x.bfloat16(), weight.bfloat16()),
        "rms_norm": lambda: ops.rms_norm(x, weight[0]),
        "glu": lambda: ops.glu(x),
        "gelu": lambda: ops.glu(x, activation="gelu_tanh"),
    }
    for op in (
        ops.rope,
        ops.paged_attention,
        ops.causal_attention,
        ops.qk_norm_rope,
        ops.log_softmax,
        ops.experts,
        ops.route,
    ):
        for i, case in enumerate(op.cases):
            if case.get("num_groups"):  # torch routes those
                continue
            torch.manual_seed(i)
            values = op.make(dtype=torch.float32, device="cpu", **case)
            cases[f"{op.name} {i}"] = lambda op=op, values=values: op(**values)
    return cases


def test_operators_have_the_same_bits_with_any_threads_and_instructions(restored: None) -> None:
    cases = calls()
    at_first = {name: call() for name, call in cases.items()}
    for variant in VARIANTS:
        if not library.library().whorl_cpu_choose(variant.encode()):
            continue
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for name, call in cases.items():
                outputs = [out if isinstance(out, tuple) else (out,) for out in (call(), at_first[name])]
                for actual, other in zip(*outputs, strict=True):
                    equal = actual is other or torch.equal(actual, other)
                    assert equal, f"{name} differs with {variant} and {threads} threads"


def test_an_unknown_instruction_set_is_refused() -> None:
    assert not library.library().whorl_cpu_choose(b"sse9")


def test_two_threads_of_python_at_once(restored: None) -> None:
    torch.set_num_threads(2)
    matrix, _ = matrix_of("Q8_0", 3000, 512)
    x = torch.randn(4, 512)
    expected, wrong = matrix.linear(x), []

    def work() -> None:
        wrong.extend(i for i in range(50) if not torch.equal(matrix.linear(x), expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_forked_child_computes(restored: None) -> None:
    torch.set_num_threads(2)
    matrix, _ = matrix_of("Q8_0", 3000, 512)
    x = torch.randn(4, 512)
    expected = matrix.linear(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(matrix.linear(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
