"""Products of packed weights: the layout, the one rounding of values, chunks of K from zero, rows that stand alone."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import without_cpu_kernels
from quant_checkpoints import CASES, EVEN, INT4, ODD, W8A8, Case, _ct_case, awq, write
from test_inference_ops import backends, subsets
from test_ops import DEVICE
from torch import Tensor

from whorl import ops
from whorl.engine import weights
from whorl.nn.weights import fp8, int8, laid_out, packed
from whorl.ops import OPS
from whorl.ops.cpu import library
from whorl.ops.quantised import layout, packed_torch_npu

KINDS: list[dict[str, Any]] = [
    {"kind": "int4", "columns": 128},
    {"kind": "int4", "columns": 32, "zeros": True},
    {"kind": "int4", "columns": 8},
    {"kind": "int8"},
    {"kind": "int8", "columns": 64, "zeros": True, "layout": "bytes_tiled"},
    {"kind": "fp8", "rows": 128, "columns": 128, "layout": "bytes_tiled"},
    {"kind": "fp8"},
]
COUNTS = (1, 3, 16, 64, 200)
names = {"ids": lambda kind: "-".join(map(str, kind.values()))}
# In the interpreter one of them, and the others where all tests run.
SOME = [kind if i == 1 else pytest.param(kind, marks=pytest.mark.slow) for i, kind in enumerate(KINDS)]


def made(op: str, kind: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **case: Any) -> dict[str, Any]:
    return OPS[op]._bind((), OPS[op].make(**case, **kind, dtype=dtype, device=DEVICE))


def rounded_to_powers(values: dict[str, Any]) -> dict[str, Any]:
    """The same with inputs and scales that leave nothing to round: sums are then exact in every order."""
    exact = dict(values)
    for name, value in values.items():
        if name == "x":
            exact[name] = torch.randint(-3, 4, value.shape, device=DEVICE).to(value.dtype)
        elif name.endswith("scales"):
            exact[name] = torch.full_like(value, 2.0**-6)
        elif isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn:
            exact[name] = torch.randint(-8, 9, value.shape, device=DEVICE).float().to(value.dtype)
    return exact


# ---- the layout


@pytest.mark.parametrize("columns", [8, 128, 200, 300])
def test_where_four_bits_stand(columns: int) -> None:
    numbers = torch.randint(0, 16, (2, 3, columns))
    codes = layout.packed_int4(numbers)
    assert codes.shape == (2, 3, layout.LAYOUTS["int4_tiled"].width(columns))
    for k in range(columns):
        w, p, i, e = k % 128 // 32, k % 32 // 8, k % 8 // 2, k % 2
        word = codes[..., k // 128 * 16 + 4 * i + w].long() & 0xFFFFFFFF
        assert torch.equal(word >> (4 * p + 16 * e) & 15, numbers[..., k])
    assert torch.equal(layout.unpacked_int4(codes, columns), numbers.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_where_bytes_stand(dtype: torch.dtype) -> None:
    numbers = torch.randint(-100, 100, (3, 150)).float().to(dtype)
    codes = layout.tiled_bytes(numbers)
    assert codes.shape == (3, layout.LAYOUTS["bytes_tiled"].width(150))
    for k in range(150):
        p, i, e = k % 64 // 8, k % 8 // 2, k % 2
        assert torch.equal(codes[:, k // 64 * 64 + 16 * i + 2 * p + e].float(), numbers[:, k].float())
    assert torch.equal(layout.plain_bytes(codes, 150).float(), numbers.float())


def test_where_pairs_of_rows_stand() -> None:
    numbers = torch.randint(0, 16, (2, 6, 5))
    codes = layout.paired_int4(numbers)
    assert codes.shape == (2, 3, 5)
    assert codes.mT.is_contiguous(), "torch_npu's order"
    for n in range(6):
        nibbles = codes[:, n // 2].int() >> 4 * (n % 2) & 15
        assert torch.equal(nibbles, (numbers[:, n] - 8) % 16)
        assert torch.equal(layout.unpaired_rows(codes[1], torch.tensor([n]))[0], numbers[1, n] - 8)
    assert torch.equal(layout.unpaired_int4(codes), numbers - 8)


# ---- values and sums


@pytest.mark.parametrize("kind", KINDS, **names)
@pytest.mark.parametrize("backend", backends("packed_linear"))
def test_values_are_rounded_once(backend: str, kind: dict[str, Any]) -> None:
    """Products with the unit vectors are the weight's values, computed here one group at a time."""
    values = made("packed_linear", kind, tokens=(1,), size=(20, 136))
    codes, scales, zeros = values["codes"].cpu(), values["scales"].double().cpu(), values["zeros"]
    numbers = layout.find(values["layout"]).unpack(codes, 136).float().double()
    expected = torch.empty(20, 136)
    for n, k in [(n, k) for n in range(20) for k in range(136)]:
        at = n // kind.get("rows", 1), k // (kind.get("columns") or 136)
        zero = (8 if kind["kind"] == "int4" else 0) if zeros is None else zeros[at]
        expected[n, k] = (numbers[n, k] - zero) * scales[at]  # exact in fp64, and so rounded as in fp32 and from there
    got = ops.packed_linear(**values | {"x": torch.eye(136, device=DEVICE).bfloat16()}, backend=backend)
    assert torch.equal(got.T.cpu(), expected.bfloat16())


def test_both_orders_of_four_bits_give_one_result() -> None:
    numbers, scales = torch.randint(0, 16, (16, 96)), torch.rand(16, 3)
    zeros, x = torch.randint(0, 17, (16, 3)), torch.randn(3, 96).bfloat16()
    tiled = x, layout.packed_int4(numbers), scales, zeros
    expected = ops.packed_linear(*tiled, columns=32, layout="int4_tiled", backend="torch")
    paired = x, layout.paired_int4(numbers), scales, zeros - 8
    assert torch.equal(ops.packed_linear(*paired, columns=32, layout="int4_paired", backend="torch"), expected)
    with pytest.raises(RuntimeError, match="reads the layouts bytes, bytes_tiled, int4_tiled, got int4_paired"):
        ops.packed_linear(*paired, columns=32, layout="int4_paired", backend="triton")
    refusal = packed_torch_npu.reason(*tiled, rows=1, columns=32, layout="int4_tiled")
    assert refusal == "reads the layouts bytes and int4_paired, got int4_tiled"


def test_a_layout_is_one_row_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit codes in bytes of their own: the dtype is that of int4_paired, and says nothing of the order."""
    own = layout.Layout(
        dtypes=(torch.uint8,),
        width=lambda columns: columns,
        unpack=lambda codes, columns: codes.flip(-1),
        middle=layout.MIDDLE,
    )
    numbers, scales = torch.randint(0, 16, (3, 16, 96)), torch.rand(3, 16, 3)
    x, options = torch.randn(5, 96).bfloat16(), {"columns": 32, "backend": "torch"}
    with pytest.raises(ValueError, match="layout is 'reversed', expected one of bytes, bytes_tiled, int4_tiled"):
        ops.packed_linear(x, numbers[0].byte(), scales[0], layout="reversed")
    monkeypatch.setitem(layout.LAYOUTS, "reversed", own)
    codes, tiled = numbers.byte().flip(-1), layout.packed_int4(numbers)
    expected = ops.packed_linear(x, tiled[0], scales[0], layout="int4_tiled", **options)
    assert torch.equal(ops.packed_linear(x, codes[0], scales[0], layout="reversed", **options), expected)
    assert torch.equal(own.picked(codes, slice(1, 3), 96), numbers[1:3])
    with pytest.raises(RuntimeError, match="got reversed"):
        ops.packed_linear(x, codes[0], scales[0], columns=32, layout="reversed", backend="triton")


@pytest.mark.parametrize("backend", backends("packed_linear"))
def test_chunks_begin_at_zero_and_are_added_in_order(backend: str) -> None:
    """At 2^33 fp32 has steps of 1024: what is added to it in smaller parts is lost."""
    codes = layout.packed_int4(torch.full((2, 3072), 9))  # ones
    ones, large = torch.ones(1, 1), 2.0**33
    x = torch.zeros(3, 3072)
    x[0, 5], x[0, 1024:2048] = large, 1  # kept, since a chunk's 1024 ones are added up first
    x[1, 5], x[1, 1024:1424], x[1, 2999] = large, 1, -large  # lost, since 400 are added before what is large goes
    x[2, 1024:1424], x[2, 5], x[2, 9] = 1, large, -large  # kept: in one chunk nothing is left of the large ones
    arguments = (t.to(DEVICE) for t in (x, codes, ones.expand(2, 1)))
    y = ops.packed_linear(*arguments, layout="int4_tiled", backend=backend)
    assert y.tolist() == [[large + 1024] * 2, [0.0] * 2, [400.0] * 2]


def test_chains_in_fp32_begin_at_zero_inside_of_a_chunk() -> None:
    """At 2^31 fp32 has steps of 256: what is added to it in blocks of 128 is lost, and a chain of 256 is kept."""
    codes = layout.packed_int4(torch.full((2, 512), 9))  # ones
    x, large = torch.zeros(1, 512), 2.0**31
    x[0, 5], x[0, 256:] = large, 1
    arguments = (t.to(DEVICE) for t in (x, codes, torch.ones(2, 1)))
    assert ops.packed_linear(*arguments, layout="int4_tiled", backend="triton").tolist() == [[large + 256] * 2]


@pytest.mark.parametrize("kind", SOME, **names)
def test_any_number_of_rows_has_the_bits_of_the_reference(kind: dict[str, Any]) -> None:
    """On numbers whose sums are exact in every order."""
    values = rounded_to_powers(made("packed_linear", kind, tokens=(200,), size=(24, 1100), bias=True))
    expected = ops.packed_linear(**values, backend="torch")
    for count in COUNTS:
        got = ops.packed_linear(**values | {"x": values["x"][:count]}, backend="triton")
        assert torch.equal(got, expected[:count]), f"{count} rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", backends("packed_linear"))
def test_rows_stand_alone(backend: str, dtype: torch.dtype) -> None:
    values = made("packed_linear", KINDS[1], dtype, tokens=(40,), size=(24, 1056))
    whole = ops.packed_linear(**values, backend=backend)
    for way in subsets(40)[:6]:
        assert torch.equal(ops.packed_linear(**values | {"x": values["x"][way]}, backend=backend), whole[way])


@pytest.mark.parametrize("kind", SOME, **names)
def test_experts_have_the_bits_of_the_reference(kind: dict[str, Any]) -> None:
    """Token by token, and sorted by expert, to the same bits."""
    case = {"tokens": (64,), "hidden": 128, "width": 64, "experts": 4, "k": 2}
    values = rounded_to_powers(made("packed_experts", kind, **case))
    expected = ops.packed_experts(**values, backend="torch")
    outputs = []
    for count in COUNTS[:4]:
        some = {n: values[n][:count] for n in ("x", "weights", "ids")}
        outputs.append(ops.packed_experts(**values | some, backend="triton"))
        off = (outputs[-1].float() - expected[:count].float()).abs().max() / expected.float().abs().max()
        assert off < 2**-7, "one step of bf16: hidden states are no whole numbers"
    assert all(torch.equal(outputs[i], outputs[3][: COUNTS[i]]) for i in range(3))


@pytest.mark.parametrize("backend", backends("int8_linear"))
def test_int8_is_the_exact_integer(backend: str) -> None:
    codes = torch.randint(-128, 128, (33, 3000), dtype=torch.int8)
    scales, x = torch.rand(33), torch.randn(20, 3000)
    x[0], codes[0] = 1, 127  # the largest sum, past the integers of fp32
    q, own = ops.dynamic_quant(x)
    sums = q.long() @ codes.long().t()
    assert int(sums.max()) > 2**24
    expected = sums.float() * scales * own[:, None]
    for count in (1, 3, 20):
        arguments = (t.to(DEVICE) for t in (x[:count], codes, scales))
        assert torch.equal(ops.int8_linear(*arguments, backend=backend).cpu(), expected[:count])


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"codes": lambda t: t[:, :8]},
            r"codes is \[40, 8\] torch.int32, expected \[.., 16\] torch.int32: 128 columns",
        ),
        (
            {"codes": lambda t: t.long()},
            r"codes is \[40, 16\] torch.int64, expected \[.., 16\] torch.int32: .* int4_tiled",
        ),
        ({"codes": lambda t: t[0]}, r"codes is \[16\] torch.int32, expected \[CN, CK\]"),
        ({"scales": lambda t: t[:, :1]}, r"scales is \[40, 1\] .*, expected \[40, 4\]"),
        ({"scales": lambda t: t.int()}, "scales is .* torch.int32, expected .* floating point"),
        ({"zeros": lambda t: t[:, :1]}, r"zeros is \[40, 1\] torch.int16, expected \[40, 4\]"),
        ({"zeros": lambda t: t.float()}, r"zeros is .* torch.float32, expected .* torch.int16 or .*"),
        ({"rows": 0}, "rows is 0, expected a positive number"),
        ({"columns": -1}, "columns is -1, expected 0 or more"),
        ({"bias": torch.ones(3)}, r"bias is \[3\] torch.float32, expected \[40\]"),
        ({"bias": torch.ones(40).double()}, r"bias is \[40\] torch.float64, expected .* or torch.float32"),
        ({"x": lambda t: t[0]}, r"x is \[128\] .*, expected \[T, K > 0\] floating point"),
        ({"x": lambda t: t[:, :0]}, r"x is \[2, 0\] .*, expected \[T, K > 0\] floating point"),
    ],
)
def test_wrong_weights_are_refused(changes: dict[str, Any], message: str) -> None:
    values = made("packed_linear", KINDS[1], tokens=(2,), size=(40, 128))
    wrong = {name: change(values[name]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(ValueError, match=f"packed_linear: .*{message}"):
        ops.packed_linear(**values | wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up": lambda t: t[:, :-1]}, r"gate_up is \[4, 63, 16\], down \[4, 64, 16\], expected codes of"),
        ({"gate_up": lambda t: t[..., :8]}, r"gate_up is \[4, 64, 8\] torch.int32, expected \[.., 16\] torch.int32"),
        ({"gate_up_scales": lambda t: t[:, 1:]}, r"gate_up_scales is \[4, 63, 2\] .*, expected \[4, 64, 2\]"),
        ({"down": lambda t: t[:, :-1]}, r"down \[4, 63, 16\], expected codes of \[E, 2F, ..\] and \[E, 64, ..\]"),
        ({"down": lambda t: t[:3]}, r"down is \[3, 64, 16\] torch.int32, expected \[4, .*"),
        ({"down": lambda t: t.long()}, "down is .* torch.int64, expected .* torch.int32"),
        ({"down_zeros": lambda t: t[..., :0]}, r"down_zeros is \[4, 64, 0\] .*, expected \[4, 64, 1\]"),
        ({"weights": lambda t: t.int()}, r"weights is \[3, 2\] torch.int32, expected \[3, .*\] floating point"),
        ({"ids": lambda t: t[:, :1]}, r"ids is \[3, 1\] .*, expected \[3, 2\]"),
        ({"ids": lambda t: t.float()}, "ids is .* torch.float32, expected .* torch.int32 or torch.int64"),
        ({"ids": lambda t: t + 4}, "ids has values from 4 to 7, expected 0 to 3"),
        ({"x": lambda t: t[0]}, r"x is \[64\] .*, expected \[T, C > 0\] floating point"),
        ({"columns": -1}, "columns is -1, expected 0 or more"),
        ({"layout": "other"}, "layout is 'other', expected one of"),
    ],
)
def test_wrong_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    case = {"tokens": (3,), "hidden": 64, "width": 32, "experts": 4, "k": 2, "kind": "int4", "columns": 32}
    values = OPS["packed_experts"].make(**case, zeros=True, dtype=torch.float32, device="cpu")
    values["ids"][0, 0], values["ids"][1, 0] = 0, 3
    wrong = {name: change(values[name]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        ops.packed_experts(**values | wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up": lambda t: t.short()}, r"gate_up is \[4, 24, 16\] torch.int16, expected \[4, 24, 16\] torch.int8"),
        ({"gate_up": lambda t: t[:, :-1]}, r"gate_up is \[4, 23, 16\] .*, expected \[4, 24, 16\]"),
        ({"gate_up_scales": lambda t: t[:, 1:]}, r"gate_up_scales is \[4, 23\] .*, expected \[E, 2\*F\]"),
        ({"down": lambda t: t[:, :-1]}, r"down is \[4, 15, 12\] .*, expected \[4, 16, 12\]"),
        (
            {"down_scales": lambda t: t.int()},
            r"down_scales is \[4, 16\] torch.int32, expected \[4, 16\] floating point",
        ),
        ({"weights": lambda t: t[:1]}, r"weights is \[1, 2\] .*, expected \[3, "),
        ({"ids": lambda t: t - 1}, "ids has values from -1 to 2, expected 0 to 3"),
    ],
)
def test_wrong_int8_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    case = {"tokens": (3,), "hidden": 16, "width": 12, "experts": 4, "k": 2}
    values = OPS["int8_experts"].make(**case, dtype=torch.float32, device="cpu")
    values["ids"][0, 0], values["ids"][1, 0] = 0, 3
    wrong = {name: change(values[name]) for name, change in changes.items()}
    with pytest.raises(ValueError, match=f"int8_experts: {message}"):
        ops.int8_experts(**values | wrong)


# ---- the engine


LAID_OUT = ["fp8-blocks", "fp8-partial", "fp8-tensor", "ct-w4", "ct-w4-zeros", "ct-w8-pack", "ct-w8", "ct-fp8-channel"]
LAID_OUT += ["awq", "gptq", "gptq-8"]


def load(path: Path) -> Any:
    return weights.load_model(path, device="cpu", dtype=torch.float32, unpack=False)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """To the bit; the rows that only fill a vocabulary up are nobody's, and may hold anything."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LAID_OUT)
def test_the_engine_reads_packed_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, here by the reference and by the CPU kernels: values, logits and rows are the plain layout's."""
    path, _ = write(tmp_path, CASES[name], "moe")
    plain = load(path)
    for module in (laid_out, packed):
        monkeypatch.setattr(module, "is_tiled_on", lambda device: True)
    model, calls = load(path), []
    for op in ("packed_linear", "packed_experts"):
        own = OPS[op].reference
        monkeypatch.setattr(OPS[op], "reference", lambda *a, own=own, op=op, **k: calls.append(op) or own(*a, **k))
    tokens = torch.tensor([1, 5, 3, 8])
    matrices = [m for m in model.modules() if laid_out.packing_of(m) is not None]
    assert matrices, "nothing was laid out"
    for mine, other in zip(model.modules(), plain.modules(), strict=True):
        if laid_out.packing_of(mine) is not None:
            rows = tokens[:2] if len(mine.shape) == 2 else slice(1, 3)
            assert_same(mine.format.values(mine), other.format.values(other))
            assert_same(mine.format.values_of(mine, rows), other.format.values_of(other, rows))
    from test_quant_formats import logits

    with without_cpu_kernels():
        assert torch.equal(logits(model), logits(plain)), "up to 1024 columns a product is that of `linear`"
    assert set(calls) == {"packed_linear", "packed_experts"}
    calls.clear()
    assert torch.equal(logits(model), logits(plain)), "whatever runs on this CPU"
    assert bool(calls) == (library.missing() is not None), "where there are kernels, those of both have one arithmetic"


# By format and dtype: how many of nine matrices torch_npu's kernels take (qkv, o, gate_up and down of two layers, and
# the head), and why they refuse others.
ON_ASCEND = {
    "ct-w4-group32": (torch.bfloat16, 8, "N must be a multiple of 8 for int4, got 97"),
    "ct-w4-channel": (torch.bfloat16, 6, "N must be a multiple of 8 for int4, got 52"),
    "ct-w4-hidden36": (torch.bfloat16, 4, "N must be a multiple of 8 for int4, got 36"),  # gate_up, but not down
    "ct-w4": (torch.bfloat16, 4, "antiquant_group_size must be a multiple of 32 below K = 64, got 16"),
    "ct-w8": (torch.float16, 9, None),
    "ct-order": (torch.bfloat16, 0, "columns are in any order, g_idx"),
    "awq-group32": (torch.float16, 4, "int4 in groups must be symmetric, got zero points and groups of 32"),
    "awq": (torch.bfloat16, 0, "its scales are torch.float16 and not exact in bfloat16"),
    "fp8-blocks": (torch.bfloat16, 0, "torch_npu multiplies bf16 by int8 and int4, not by fp8"),
}
MORE_CASES = {
    "ct-w4-group32": _ct_case("pack-quantized", EVEN, **{**INT4, "group_size": 32}),
    "ct-w4-hidden36": _ct_case(
        "pack-quantized",
        ODD | {"hidden_size": 36, "moe_intermediate_size": 24},
        **{**INT4, "strategy": "channel", "group_size": None},
    ),
    "awq-group32": Case({**CASES["awq"].settings, "group_size": 32}, awq(32), sizes=EVEN),
}


@pytest.mark.parametrize("name", ON_ASCEND)
def test_ascend_reads_packed_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NPU, here by the reference: what its kernels take is laid out once, and products copy nothing of it."""
    dtype, count, reason = ON_ASCEND[name]
    path, _ = write(tmp_path, (CASES | MORE_CASES)[name], "moe")
    reasons: list[str] = []
    for module in (laid_out, packed, fp8, int8):
        monkeypatch.setattr(module, "is_tiled_on", lambda device: False, raising=False)
        monkeypatch.setattr(module, "warn_unpacked", lambda device, kind, why: reasons.append(why))
    model = weights.load_model(path, device="cpu", dtype=dtype, unpack=False)
    monkeypatch.undo()
    plain = weights.load_model(path, device="cpu", dtype=dtype, unpack=False)
    pairs = zip(model.modules(), plain.modules(), strict=True)
    pairs = [(mine, other) for mine, other in pairs if laid_out.packing_of(mine) is not None]
    assert len(pairs) == count
    assert any(reason in why for why in reasons) if reason else not reasons
    for mine, other in pairs:
        rows = torch.tensor([5, 0, 3]) if len(mine.shape) == 2 else slice(1, 3)
        assert_same(mine.format.values(mine), other.format.values(other))
        assert_same(mine.format.values_of(mine, rows), other.format.values_of(other, rows))
        assert packed_torch_npu._weight(mine.codes, mine.packing.layout).data_ptr() == mine.codes.data_ptr()
        assert mine.scales.mT.is_contiguous()
        assert mine.scales.dtype == dtype
    from test_quant_formats import logits

    assert torch.equal(logits(model), logits(plain))


def test_int8_activations_have_operators_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_quant_formats import logits

    path, _ = write(tmp_path, W8A8, "moe")
    calls = []
    for op in ("int8_linear", "int8_experts"):
        own = OPS[op].reference
        monkeypatch.setattr(OPS[op], "reference", lambda *a, own=own, op=op, **k: calls.append(op) or own(*a, **k))
    logits(load(path))
    assert set(calls) == {"int8_linear", "int8_experts"}


def test_what_no_kernel_reads_is_said() -> None:
    with pytest.warns(RuntimeWarning, match=r"of 4 bits: cuda has no kernel that reads them packed \(g_idx\)"):
        laid_out.warn_unpacked(torch.device("cuda"), "weights of 4 bits", "g_idx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        laid_out.warn_unpacked(torch.device("cpu"), "weights of 4 bits", "g_idx")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAID_OUT)
def test_on_a_gpu_kernels_read_packed_weights(name: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, CASES[name], "moe")
    model = weights.load_model(path, device="cuda", dtype=torch.bfloat16)
    packed = [m for m in model.modules() if laid_out.packing_of(m) is not None]
    assert packed, json.dumps([type(m).__name__ for m in model.modules()])
    for matrix in (m for m in packed if len(m.shape) == 2):
        x = torch.randn(70, matrix.shape[1], device="cuda").bfloat16()
        held = matrix.codes, matrix.scales, getattr(matrix, "zeros", None)
        assert ops.packed_linear.choose(x, *held, **matrix.packing._asdict()).backend == "triton"
        whole = matrix.format.linear(matrix, x, None)
        assert torch.equal(matrix.format.linear(matrix, x[:1], None), whole[:1])
        gold = x.double() @ matrix.format.values(matrix).double().T
        assert (whole.double() - gold).abs().max() <= 2**-7 * gold.abs().max()
