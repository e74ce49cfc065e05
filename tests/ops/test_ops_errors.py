"""Every wrong input is a ValueError that names the operator, the argument, what was found and what was expected."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl import ops
from whorl.ops import OPS

Values = dict[str, Any]
Change = Callable[[Values], Values]
_SIZES = {"tokens": (5,), "heads": 2, "kv_heads": 1, "dim": 16}
CASES: dict[str, Values] = {
    "rope": _SIZES,
    "rope_": _SIZES,
    "qk_norm_rope": _SIZES,
    "qk_norm_rope_write": _SIZES,
    "rms_norm": {"shape": (5, 16)},
    "add_rms_norm": {"shape": (5, 16)},
    "glu": {"shape": (5, 16)},
}


def arguments(name: str) -> Values:
    return OPS[name].make(**CASES[name], dtype=torch.float32, device="cpu")


def put(**changes: Any) -> Change:
    """Replace arguments; a function is given the old value."""
    return lambda values: {n: c(values[n]) if callable(c) else c for n, c in changes.items()}


def set_position(value: int) -> Change:
    def change(values: Values) -> Values:
        positions = values["positions"].clone()
        positions.view(-1)[-1] = value
        return {"positions": positions}

    return change


def narrow(size: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[..., :size]


ROTARY: dict[str, tuple[Change, str]] = {
    "integer q": (put(q=torch.Tensor.int, k=torch.Tensor.int), r"q is .* torch\.int32, expected .* floating point"),
    "q without tokens": (
        put(q=lambda q: q[0], k=lambda k: k[0], positions=lambda p: p[0]),
        r"q is \[2, 16\], expected \[T, HQ, D\]",
    ),
    "three dims of tokens": (
        put(q=lambda q: q[None, None], k=lambda k: k[None, None], positions=lambda p: p[None, None]),
        r"q is \[1, 1, 5, 2, 16\], expected \[T, HQ, D\] or \[B, S, HQ, D\]",
    ),
    "k of another dtype": (put(k=torch.Tensor.half), r"k is \[5, 1, 16\] torch\.float16, expected .*torch\.float32"),
    "k of other tokens": (put(k=lambda k: k[:4]), r"k is \[4, 1, 16\] .*, expected \[5, HK, 16\]"),
    "k of another head size": (put(k=narrow(8)), r"k is \[5, 1, 8\] .*, expected \[5, HK, 16\]"),
    "k without heads": (put(k=lambda k: k[:, 0]), r"k is \[5, 16\] .*, expected \[5, HK, 16\]"),
    "low precision table": (
        put(cos_sin=torch.Tensor.bfloat16),
        r"cos_sin is \[\d+, 16\] torch\.bfloat16, expected .* torch\.float32",
    ),
    "high precision table": (
        put(cos_sin=torch.Tensor.double),
        r"cos_sin is \[\d+, 16\] torch\.float64, expected .* torch\.float32",
    ),
    "trained table": (put(cos_sin=lambda t: t.clone().requires_grad_()), r"cos_sin requires a gradient, expected"),
    "odd rotary size": (put(cos_sin=narrow(15)), r"cos_sin is \[\d+, 15\] .*, expected \[.*, 2\*H > 0\]"),
    "rotary size past the head": (put(cos_sin=lambda t: torch.cat((t, t), -1)), r"width 32, expected .* at most 16"),
    "no rotary size": (put(cos_sin=narrow(0)), r"cos_sin is \[\d+, 0\] .*, expected \[.*, 2\*H > 0\]"),
    "floating positions": (put(positions=torch.Tensor.float), r"positions is .* torch\.float32, expected .*int32 or"),
    "position past the table": (set_position(64), r"position 64 is outside the table of 64 rows"),
    "negative position": (set_position(-1), r"position -1 is outside the table of 64 rows"),
    "table of three dims": (put(cos_sin=lambda t: t[None]), r"cos_sin is \[1, 64, 16\], expected a table \[P, R\]"),
    "positions of other tokens": (put(positions=lambda p: p[:4]), r"positions is \[4\] .*, expected \[5\]"),
    "rows of other tokens": (
        put(positions=None),
        r"cos_sin is \[64, 16\], expected one row .*\[5, 'R'\]",
    ),
    "wrong style": (put(style="neox"), r"style is 'neox', expected one of half, pairs"),
    "wrong out_style": (put(out_style="interleave"), r"out_style is 'interleave', expected one of half, pairs, None"),
    "wrong end": (put(where="middle"), r"where is 'middle', expected one of leading, trailing"),
}
SECTIONS: dict[str, tuple[Change, str]] = {
    "floating positions": (put(positions=torch.Tensor.float), r"positions is torch\.float32, expected torch\.int32 or"),
    "position past the table": (set_position(64), r"position 64 is outside the table of 64 rows"),
    "table of three dims": (put(cos_sin=lambda t: t[None]), r"cos_sin is \[1, 64, 16\], expected a table \[P, R\]"),
    "one row of positions": (put(positions=lambda p: p[0]), r"positions has 5 rows, sections \[2, 3, 3\] need 3"),
    "section sum": (put(sections=[2, 3, 4]), r"sections \[2, 3, 4\] sum to 9, the table has 8 channels"),
    "rows and sections": (put(sections=[2, 2, 2, 2]), r"positions has 3 rows, sections \[2, 2, 2, 2\] need 4"),
    "two sections": (put(sections=[4, 4], positions=lambda p: p[:2]), r"sections is \[4, 4\], expected 3 or 4 counts"),
    "negative section": (put(sections=[-1, 4, 5]), r"sections is \[-1, 4, 5\], expected 3 or 4 counts of channels"),
    "four interleaved": (
        put(sections=[2, 2, 2, 2], positions=lambda p: torch.cat((p, p[:1])), layout="interleaved"),
        r"layout 'interleaved' takes 3 sections, got \[2, 2, 2, 2\]",
    ),
    "interleaved past the end": (
        put(sections=[1, 4, 3], layout="interleaved"),
        r"sections \[1, 4, 3\] cannot be",
    ),
    "uneven hwt": (put(sections=[2, 3, 3], layout="hwt"), r"sections \[2, 3, 3\]: h and w alternate .* must be equal"),
    "wrong layout": (put(layout="striped"), r"layout is 'striped', expected one of chunked, interleaved, hwt"),
}
PACKED: dict[str, tuple[Change, str]] = {
    n: c for n, c in ROTARY.items() if not any(w in n for w in ("k ", "q", "dims of tokens", "out_style", "end"))
} | {
    "qkv without tokens": (
        put(qkv=lambda x: x[0], positions=lambda p: p[0]),
        r"q is \[2, 16\], expected \[T, HQ, D\] or",
    ),
    "width that is no number of heads": (
        put(qkv=narrow(62)),
        r"qkv is \[5, 62\] .*, expected \[.*, \(2 \+ 2\*1\)\*D\]",
    ),
    "no heads": (
        put(num_heads=0, q_weight=torch.ones(32), k_weight=torch.ones(32)),
        r"num_heads is 0, expected a positive number",
    ),
    "heads of another size": (put(num_heads=6), r"q_weight is \[16\] .*, expected \[8\]"),
    "integer qkv": (put(qkv=torch.Tensor.int), r"qkv is .* torch\.int32, expected .* floating point"),
    "q_weight of another size": (put(q_weight=narrow(8)), r"q_weight is \[8\] .*, expected \[16\]"),
    "k_weight of another dtype": (
        put(k_weight=torch.Tensor.half),
        r"k_weight is \[16\] torch\.float16, expected",
    ),
    "eps": (put(eps=0.0), r"eps is 0\.0, expected a positive number"),
}
WRITTEN: dict[str, tuple[Change, str]] = {
    n: c for n, c in PACKED.items() if not any(w in n for w in ("position", "without tokens", "rows of", "three dims"))
} | {
    "no heads": (put(num_heads=0), r"q_weight is \[16\] .*, expected \[32\]"),
    "qkv of two dims of tokens": (put(qkv=lambda x: x[None]), r"qkv is \[1, 5, 64\] .*, expected \[T, "),
    "rows of other tokens": (put(cos_sin=lambda t: t[:4]), r"cos_sin is \[4, 16\] .*, expected \[5, "),
    "trained table": (put(cos_sin=lambda t: t.clone().requires_grad_()), r"cos_sin requires a gradient, expected"),
    "q of other heads": (put(q=lambda q: q[:, :1]), r"q is \[5, 1, 16\] .*, expected \[5, 2, 16\]"),
    "q of another dtype": (put(q=torch.Tensor.half), r"q is .* torch\.float16, expected .* torch\.float32"),
    "cache of other heads": (
        put(k_cache=lambda x: x.expand(-1, -1, 2, -1)),
        r"k_cache is \[.*, 2, 16\] .*, expected \[.*1, 16\]",
    ),
    "caches of two sizes": (put(v_cache=lambda x: x[1:]), r"v_cache is .*, expected "),
    "caches of two dtypes": (
        put(v_cache=torch.Tensor.half),
        r"v_cache is .* torch\.float16, expected .* torch\.float32",
    ),
    "codes without scales": (
        put(k_cache=torch.Tensor.char, v_cache=torch.Tensor.char),
        r"k_cache is torch\.int8 and k_scale is None, expected the scales of its codes",
    ),
    "scales of a wide cache": (
        lambda values: dict.fromkeys(("k_scale", "v_scale"), torch.zeros(values["k_cache"].shape[0], 1, 4)),
        r"k_scale is given and k_cache is torch\.float32, expected int8 or float8_e4m3fn",
    ),
    "scales of other tokens": (
        lambda values: dict.fromkeys(("k_scale", "v_scale"), torch.zeros(values["k_cache"].shape[0], 1, 3)),
        r"k_scale is \[\d+, 1, 3\] .*, expected \[\d+, 1, 4\]",
    ),
    "one scale": (
        lambda values: {"k_scale": torch.zeros(values["k_cache"].shape[0], 1, 4)},
        r"one of k_scale and v_scale is given, expected both or neither",
    ),
    "slots of other tokens": (put(slots=lambda s: s[:4]), r"slots is \[4\] .*, expected \[5\]"),
    "floating slots": (put(slots=torch.Tensor.float), r"slots is .* torch\.float32, expected .* torch\.int32 or"),
}
NORM: dict[str, tuple[Change, str]] = {
    "integer x": (put(x=torch.Tensor.int), r"x is \[5, 16\] torch\.int32, expected \[5, 16\] floating point"),
    "weight of another size": (put(weight=narrow(8)), r"weight is \[8\] .*, expected \[16\] torch\.float32"),
    "weight of two dims": (put(weight=lambda w: w[None]), r"weight is \[1, 16\] .*, expected \[16\] torch\.float32"),
    "weight of another dtype": (put(weight=torch.Tensor.half), r"weight is \[16\] torch\.float16, expected .*float32"),
    "scalar x": (put(x=torch.tensor(1.0)), r"x is \[\] torch\.float32, expected \[\.\.\., C\]"),
    "eps": (put(eps=-1.0), r"eps is -1\.0, expected a positive number"),
}
ADD: dict[str, tuple[Change, str]] = {
    "residual of another shape": (put(residual=lambda r: r[:4]), r"residual is \[4, 16\] .*, expected .*\[5, 16\]"),
    "residual of another dtype": (put(residual=torch.Tensor.half), r"residual is \[5, 16\] torch\.float16, expected"),
}
GLU: dict[str, tuple[Change, str]] = {
    "odd width": (put(x=narrow(15)), r"x is \[5, 15\] torch\.float32, expected \[\.\.\., 2\*F\] floating point"),
    "integer x": (put(x=torch.Tensor.int), r"x is \[5, 16\] torch\.int32, expected \[5, 16\] floating point"),
    "scalar x": (put(x=torch.tensor(1.0)), r"x is \[\] torch\.float32, expected \[\.\.\., 2\*F\]"),
    "wrong activation": (put(activation="relu"), r"activation is 'relu', expected one of silu, gelu_tanh"),
}
WRONG = {
    "rope": ROTARY,
    "rope_": ROTARY,
    "qk_norm_rope": PACKED,
    "qk_norm_rope_write": WRITTEN,
    "rms_norm": NORM,
    "add_rms_norm": NORM | ADD,
    "glu": GLU,
}


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, table in WRONG.items() for what in table])
def test_wrong_input(name: str, what: str) -> None:
    change, message = WRONG[name][what]
    values = arguments(name)
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        OPS[name](**(values | change(values)))


@pytest.mark.parametrize("name", OPS)
def test_a_dtype_is_expected_once(name: str) -> None:
    """Not "expected torch.float32 or torch.float32" where x itself is in fp32."""
    op = OPS[name]
    values = op.make(**op.cases[0], dtype=torch.float32, device="cpu")
    absent = [n for n in ("bias", "residual", "k_scale", "v_scale") if n in values and values[n] is None]
    values |= {n: torch.ones(3) for n in absent}
    for argument, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            for other in (value.half(), value.double(), value[..., :0]):
                message = refusal(op, values | {argument: other})
                assert not re.search(r"(?:torch\.float|fp)32,? or (?:torch\.float|fp)32", message), message


def refusal(op: Any, values: Values) -> str:
    """The message of the ValueError that a call raises; "" where it runs, or something else refuses it."""
    try:
        op(**values)
    except ValueError as error:
        return str(error)
    except Exception:
        return ""
    return ""


@pytest.mark.parametrize("name", WRONG)
def test_right_input(name: str) -> None:
    """What the wrong inputs are changed from is itself accepted."""
    OPS[name](**arguments(name))


@pytest.mark.parametrize("what", ["position past the table", "odd rotary size", "k of another head size"])
def test_wrong_input_under_grad(what: str) -> None:
    change, message = ROTARY[what]
    values = arguments("rope")
    values = values | change(values)
    values["q"].requires_grad_()
    with pytest.raises(ValueError, match=f"rope: .*{message}"):
        ops.rope(**values)


def test_wrong_input_while_compiling() -> None:
    values = arguments("rope") | {"cos_sin": torch.randn(64, 15)}
    with pytest.raises(Exception, match=r"rope: cos_sin is \[64, 15\]"):
        torch.compile(lambda: ops.rope(**values), backend="eager", fullgraph=True)()


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_kernels_give_nan_for_a_position_outside_the_table(name: str, device: str) -> None:
    """Where positions cannot be looked at first, a wrong one must show in its token and nowhere else."""
    op = OPS[name]
    values = op._bind((), op.make(**CASES[name], dtype=torch.float32, device=device))
    expected = op.impls["triton"].function(**values)
    values["positions"][..., 1], values["positions"][..., 3] = 64, -1
    got = op.impls["triton"].function(**values)
    for g, e in zip(got[:2], expected[:2], strict=True):
        assert g[[1, 3]].isnan().any(-1).all()
        assert torch.equal(g[[0, 2, 4]], e[[0, 2, 4]])


def test_tokens_first_names_the_orders() -> None:
    x = torch.randn(2, 3, 4, 5)
    for order, shape in {"bshd": (2, 3, 4, 5), "bhsd": (2, 4, 3, 5), "sbhd": (3, 2, 4, 5)}.items():
        view = ops.tokens_first(x, order)
        assert view.shape == shape
        assert view.data_ptr() == x.data_ptr()
        assert torch.equal(ops.tokens_first(view, order), x)
    with pytest.raises(ValueError, match="tokens_first: order is 'hsd', expected one of thd, bshd, bhsd, sbhd"):
        ops.tokens_first(x, "hsd")


@pytest.mark.parametrize("what", SECTIONS)
def test_merge_mrope_refuses(what: str) -> None:
    positions = torch.zeros(3, 5, dtype=torch.int64)
    values = {"cos_sin": torch.randn(64, 16), "positions": positions, "sections": [2, 3, 3], "layout": "chunked"}
    ops.merge_mrope(**values)
    change, message = SECTIONS[what]
    with pytest.raises(ValueError, match=f"^merge_mrope: {message}"):
        ops.merge_mrope(**values | change(values))
