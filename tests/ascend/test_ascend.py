"""whorl.ascend on any device: the vendor's formulas, written apart in npu/kernels.py, and its aliasing and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from npu.kernels import IN_PLACE, KERNELS
from torch import Tensor

from whorl import ascend, ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["half", "interleave"]


def close(got: Any, expected: Any) -> None:
    """Equal but for the order of fp32 operations: one unit in the last place."""
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            close(g, e)
        return
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * eps, atol=4 * eps)


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(device, dtype)


def check(name: str, device: str, *args: Any, **kwargs: Any) -> None:
    """The same call of ours, on `device`, and of the formula, on the CPU."""
    to_device = [a.to(device) if isinstance(a, Tensor) else a for a in args]
    on_device = {n: a.to(device) if isinstance(a, Tensor) else a for n, a in kwargs.items()}
    got = getattr(ascend, name)(*to_device, **on_device)
    got = tuple(g.cpu() for g in got) if isinstance(got, tuple) else got.cpu()
    close(got, KERNELS[name](*args, **kwargs))


# Numbers.

BROADCASTS = {
    "11SD": ((2, 5, 7, 16), (1, 1, 7, 16)),
    "B1SD": ((2, 5, 7, 16), (2, 1, 7, 16)),
    "BNSD": ((2, 5, 7, 16), (2, 5, 7, 16)),
    "1S1D": ((2, 7, 5, 16), (1, 7, 1, 16)),
    "BS1D": ((2, 7, 5, 16), (2, 7, 1, 16)),
    "S11D": ((7, 2, 5, 16), (7, 1, 1, 16)),
    "SB1D": ((7, 2, 5, 16), (7, 2, 1, 16)),
    "T1D": ((7, 5, 16), (7, 1, 16)),
    "TND": ((7, 5, 16), (7, 5, 16)),
    "one token": ((1, 1, 1, 2), (1, 1, 1, 2)),
    "wide": ((1, 3, 2, 894), (1, 3, 1, 894)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_rotary_mul(broadcast: str, mode: str, dtype: torch.dtype, device: str) -> None:
    """Full-width tables of any numbers: their two halves differ here."""
    shape, cos_shape = BROADCASTS[broadcast]
    beyond = mode == "interleave" and broadcast in ("B1SD", "BNSD", "BS1D", "SB1D", "TND")
    if beyond:
        with pytest.raises(ValueError, match="interleave needs one cos row"):
            ascend.npu_rotary_mul(randn(*shape), randn(*cos_shape), randn(*cos_shape), mode)
    args = randn(*shape, dtype=dtype), randn(*cos_shape), randn(*cos_shape)
    with ascend.limits("ignore" if beyond else "enforce"):
        check("npu_rotary_mul", device, *args, mode)
        check("npu_rotary_position_embedding", device, *args, MODES.index(mode))


def test_rotary_mul_rounds_the_tables_to_inputs_dtype() -> None:
    x, cos, sin = randn(1, 7, 5, 16, dtype=torch.bfloat16), randn(1, 7, 1, 16), randn(1, 7, 1, 16)
    assert torch.equal(ascend.npu_rotary_mul(x, cos, sin), ascend.npu_rotary_mul(x, cos.bfloat16(), sin.bfloat16()))


@pytest.mark.parametrize("mode", MODES)
def test_rotary_mul_of_a_strided_tensor(mode: str, device: str) -> None:
    x = randn(2, 7, 5, 32)[..., 8:24].transpose(1, 2)
    check("npu_rotary_mul", device, x, randn(1, 1, 7, 16), randn(1, 1, 7, 16), mode)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_mul_by_a_matrix(dtype: torch.dtype, device: str) -> None:
    x, cos, sin = randn(2, 7, 5, 16, dtype=dtype), randn(1, 7, 1, 16), randn(1, 7, 1, 16)
    half, interleave = torch.zeros(16, 16), torch.zeros(16, 16)
    half[:8, 8:], half[8:, :8] = torch.eye(8), -torch.eye(8)
    for i in range(0, 16, 2):
        interleave[i, i + 1], interleave[i + 1, i] = 1, -1
    for mode, rotate in (("half", half), ("interleave", interleave)):
        check("npu_rotary_mul", device, x, cos, sin, mode, rotate)
        close(ascend.npu_rotary_mul(x, cos, sin, mode, rotate), ascend.npu_rotary_mul(x, cos, sin, mode))


def test_rotary_mul_is_transformers_llama() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, angles = randn(2, 4, 7, 32), randn(2, 2, 7, 32), randn(2, 7, 16)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    close(tuple(ascend.npu_rotary_mul(x, cos[:, None], sin[:, None]) for x in (q, k)), expected)


MROPE_CASES: dict[str, dict[str, Any]] = {
    "plain": {"rows": None, "rotary": 128},
    "zero sections": {"rows": None, "rotary": 64, "mrope_section": [0, 0, 0]},
    "partial": {"rows": None, "rotary": 96},
    "chunked": {"rows": 3, "rotary": 128, "mrope_section": [16, 24, 24]},
    "chunked partial": {"rows": 3, "rotary": 64, "mrope_section": [8, 12, 12]},
    "four": {"rows": 4, "rotary": 128, "mrope_section": [16, 16, 16, 16]},
    "interleaved": {"rows": 3, "rotary": 128, "mrope_section": [24, 20, 20], "cache_mode": "interleave"},
    "interleaved, cut off": {"rows": 3, "rotary": 128, "mrope_section": [16, 24, 24], "cache_mode": "interleave"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MROPE_CASES)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_mrope(tokens: int, name: str, mode: str, dtype: torch.dtype, device: str) -> None:
    case = dict(MROPE_CASES[name])
    rows, rotary = case.pop("rows"), case.pop("rotary")
    positions = torch.randint(0, 50, (tokens,) if rows is None else (rows, tokens), dtype=torch.int32)
    query, key = randn(tokens, 4 * 128, dtype=dtype), randn(tokens, 128, dtype=dtype)
    check("npu_mrope", device, positions, query, key, randn(50, rotary, dtype=dtype), 128, rotary_mode=mode, **case)


def test_mrope_follows_the_vendors_formula_and_ops_follows_transformers() -> None:
    """w ends at channel 3h for npu_mrope and at 3w for ops.merge_mrope."""
    positions, table, x = torch.randint(0, 50, (3, 6)), randn(50, 128), randn(6, 128)
    keywords = {"mrope_section": [28, 20, 16], "cache_mode": "interleave"}
    with pytest.raises(ValueError, match=r"npu_mrope: sections \[28, 20, 16\] are not documented"):
        ascend.npu_mrope(positions, x, x, table, 128, **keywords)
    with ascend.limits("ignore"):
        ours, _ = ascend.npu_mrope(positions, x, x, table, 128, **keywords)
    close(ours, KERNELS["npu_mrope"](positions, x, x, table, 128, **keywords)[0])
    rows = ops.merge_mrope(table, positions, [28, 20, 16], "interleaved")
    theirs, _ = ops.rope(x[:, None], None, rows)
    differs = (ours - theirs.flatten(-2)).abs().amax(0)[:64] > 1e-3
    assert set(differs.nonzero().flatten().tolist()) == {50, 53, 56, 59}


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("cos_shape", [(2, 1, 7, 64), (2, 1, 1, 64)])
def test_interleave_rope(cos_shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    args = randn(2, 5, 7, 64, dtype=dtype), randn(*cos_shape, dtype=dtype), randn(*cos_shape, dtype=dtype)
    check("npu_interleave_rope", device, *args)


def test_interleave_rope_is_transformers_deepseek() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    q, k, angles = randn(2, 4, 7, 64), randn(2, 1, 7, 64), randn(2, 7, 32)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    with ascend.limits("ignore"):  # for fp32
        got = tuple(ascend.npu_interleave_rope(x, cos[:, None], sin[:, None]) for x in (q, k))
    close(got, apply_rotary_pos_emb_interleave(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "tokens"), [("BSND", (2, 7)), ("TND", (7,))])
def test_apply_rotary_pos_emb_works_in_place(
    layout: str, tokens: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    cos, sin = randn(*tokens, 1, 64, dtype=dtype), randn(*tokens, 1, 64, dtype=dtype)
    query, key = randn(*tokens, 5, 64, dtype=dtype), randn(*tokens, 2, 64, dtype=dtype)
    q, k = query.to(device, copy=True), key.to(device, copy=True)
    out = ascend.npu_apply_rotary_pos_emb(q, k, cos.to(device), sin.to(device), layout)
    assert out[0] is q
    assert out[1] is k
    close((q.cpu(), k.cpu()), IN_PLACE["npu_apply_rotary_pos_emb"](query, key, cos, sin, layout))


def test_apply_rotary_pos_emb_of_newer_devices() -> None:
    """With limits lifted: other layouts, pairs, a table narrower than the head, positions shared by the batch."""
    query, key, cos, sin = randn(2, 5, 7, 96), randn(2, 1, 7, 96), randn(1, 1, 7, 32), randn(1, 1, 7, 32)
    tails = query[..., 32:].clone()
    expected = tuple(KERNELS["npu_rotary_mul"](x[..., :32], cos, sin, "interleave") for x in (query, key))
    with ascend.limits("ignore"):
        ascend.npu_apply_rotary_pos_emb(query, key, cos, sin, "BNSD", "interleave")
    close((query[..., :32], key[..., :32], query[..., 32:]), (*expected, tails))


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding_works_in_place_with_the_table_it_is_given(neox: bool, device: str) -> None:
    """Query and key are slices of one qkv; a second table in the same process counts, unlike in ATB."""
    positions, qkv = torch.randint(0, 50, (9,)), randn(9, 6 * 64, dtype=torch.float16)
    for table in (randn(50, 64, dtype=torch.float16), randn(50, 64, dtype=torch.float16)):
        ours = qkv.to(device, copy=True)
        query, key = ours[:, :256], ours[:, 256:320]
        args = positions.to(device), query, key, 64, table.to(device), neox
        assert ascend._npu_rotary_embedding(*args) is None
        expected = qkv.clone()
        IN_PLACE["_npu_rotary_embedding"](positions, expected[:, :256], expected[:, 256:320], 64, table, neox)
        close(ours.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma_shape", [(48,), (5, 48)])
def test_norms(gamma_shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, y, gamma = randn(3, 5, 48, dtype=dtype), randn(3, 5, 48, dtype=dtype), randn(*gamma_shape, dtype=dtype)
    check("npu_rms_norm", device, x, gamma, 1e-3)
    check("npu_rms_norm", device, x, gamma.float())
    check("npu_add_rms_norm", device, x, y, gamma, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu(dim: int, dtype: torch.dtype, device: str) -> None:
    x = randn(6, 10, 34, dtype=dtype)
    check("npu_swiglu", device, x, dim)
    assert ascend.npu_swiglu(x, dim).is_contiguous()


# Gradients: where torch_npu has one, ours is the formula's; where it has none, ours is loud.


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("tables", [False, True])
def test_rotary_gradients(tables: bool, mode: int) -> None:
    leaves = [randn(2, 3, 2, 8).double().requires_grad_()]
    leaves += [randn(1, 3, 1, 8).double().requires_grad_(tables) for _ in range(2)]
    packed = [leaf.detach()[0].requires_grad_(leaf.requires_grad) for leaf in leaves]
    with ascend.limits("ignore"):
        torch.testing.assert_close(
            ascend.npu_rotary_mul(*leaves, MODES[mode]),
            ascend.npu_rotary_mul(*(t.detach() for t in leaves), MODES[mode]),
        )
        assert torch.autograd.gradcheck(lambda *a: ascend.npu_rotary_mul(*a, MODES[mode]), leaves)
        assert torch.autograd.gradcheck(lambda *a: ascend.npu_rotary_mul(*a, MODES[mode]), packed)
        assert torch.autograd.gradcheck(lambda *a: ascend.npu_rotary_position_embedding(*a, mode), leaves)


def test_norm_and_activation_gradients() -> None:
    x, gamma = randn(3, 8).double().requires_grad_(), randn(8).double().requires_grad_()
    with ascend.limits("ignore"):
        assert torch.autograd.gradcheck(lambda *a: ascend.npu_rms_norm(*a)[0], (x, gamma))
        assert torch.autograd.gradcheck(lambda a: ascend.npu_swiglu(a, 1), (x,))
    y, rstd = ascend.npu_rms_norm(x.float(), gamma.float())
    assert y.requires_grad
    assert not rstd.requires_grad


def mrope_arguments() -> list[Any]:
    return [torch.arange(4), randn(4, 64), randn(4, 64), randn(8, 64), 64]


NO_GRADIENT: dict[str, tuple[Callable[[], list[Any]], int, str]] = {
    "npu_mrope": (mrope_arguments, 1, "drops it silently"),
    "npu_interleave_rope": (lambda: [randn(1, 1, 3, 64, dtype=torch.float16)] * 3, 0, "has none"),
    "npu_apply_rotary_pos_emb": (lambda: [randn(1, 2, 1, 64) for _ in range(4)], 1, "has none"),
    "_npu_rotary_embedding": (
        lambda: (
            [torch.arange(4), *(randn(4, 64, dtype=torch.float16) for _ in range(2)), 64]
            + [randn(8, 64, dtype=torch.float16), True]
        ),
        2,
        "drops it silently",
    ),
    "npu_add_rms_norm": (lambda: [randn(4, 8), randn(4, 8), randn(8)], 2, "has none"),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_gradient_that_torch_npu_lacks_is_an_error(name: str) -> None:
    make, position, says = NO_GRADIENT[name]
    args = make()
    args[position] = args[position].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}: a gradient is needed and torch_npu {says}"):
        getattr(ascend, name)(*args)
    with torch.no_grad():
        getattr(ascend, name)(*args)


def test_partial_gradients_are_errors() -> None:
    x, cos, sin = randn(1, 3, 2, 8), randn(1, 3, 1, 8).requires_grad_(), randn(1, 3, 1, 8)
    with pytest.raises(RuntimeError, match=r"npu_rotary_position_embedding: .* only when both"):
        ascend.npu_rotary_position_embedding(x, cos, sin)
    with pytest.raises(RuntimeError, match="npu_rotary_mul: `rotate` has no backward"):
        ascend.npu_rotary_mul(x, cos, sin, rotate=torch.eye(8))


@pytest.mark.parametrize(
    ("args", "keywords", "says"),
    [
        ((), {}, "missing 1 required positional argument: 'input'"),
        ((torch.ones(2, 2), 1, 2), {}, "takes from 1 to 2 positional arguments but 3 were given"),
        ((torch.ones(2, 2), 1), {"dim": 1}, "got multiple values for argument 'dim'"),
        ((torch.ones(2, 2),), {"axis": 1}, "got an unexpected keyword argument 'axis'"),
    ],
)
def test_arguments_are_bound_as_python_binds_them(args: tuple[Any, ...], keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=rf"npu_swiglu\(\) {says}"):
        ascend.npu_swiglu(*args, **keywords)


# Limits.


# A call of each name that has a meaning and breaks a documented limit.
BEYOND: dict[str, tuple[Callable[[], Any], str]] = {
    "npu_rotary_mul": (lambda: ascend.npu_rotary_mul(randn(3, 2, 8), *[randn(1, 1, 8)] * 2), "cos has 1 positions"),
    "npu_mrope": (
        lambda: ascend.npu_mrope(torch.arange(4), *[randn(4, 64, dtype=torch.bfloat16)] * 2, randn(8, 64), 64),
        "cos_sin_cache must have query's dtype bfloat16, got float32",
    ),
    "npu_interleave_rope": (lambda: ascend.npu_interleave_rope(*[randn(1, 1, 3, 32)] * 3), "got float32"),
    "npu_apply_rotary_pos_emb": (lambda: ascend.npu_apply_rotary_pos_emb(*[randn(1, 2, 1, 32)] * 4), "64 or 128"),
    "_npu_rotary_embedding": (
        lambda: ascend._npu_rotary_embedding(torch.arange(4), *[randn(4, 64)] * 2, 64, randn(8, 64), True),
        "got float32",
    ),
    "npu_rotary_position_embedding": (
        lambda: ascend.npu_rotary_position_embedding(*[randn(3, 1000, 8)] * 3),
        "N=1000",
    ),
    "npu_rms_norm": (lambda: ascend.npu_rms_norm(randn(2, 8).double(), randn(8).double()), "got float64"),
    "npu_add_rms_norm": (lambda: ascend.npu_add_rms_norm(randn(0, 8), randn(0, 8), randn(8)), "empty"),
    "npu_swiglu": (lambda: ascend.npu_swiglu(randn(8, 4).t()), "contiguous"),
}


def judge_limit(name: str, call: Callable[[], Any], says: str) -> None:
    """An error until it is lifted, and after."""
    with pytest.raises(ValueError, match=rf"^{name}: .*{says}.*limits\('ignore'\) lifts it"):
        call()
    with ascend.limits("ignore"):
        call()
    with pytest.raises(ValueError, match=name):
        call()


@pytest.mark.parametrize("name", BEYOND)
def test_a_limit_is_an_error_until_it_is_lifted(name: str) -> None:
    judge_limit(name, *BEYOND[name])


def test_limits_is_a_setting_and_a_block() -> None:
    before = ascend.limits("ignore")
    try:
        ascend.npu_swiglu(randn(8, 4).t())
        with pytest.raises(ZeroDivisionError), ascend.limits("enforce"):
            1 / 0  # noqa: B018
        ascend.npu_swiglu(randn(8, 4).t())
    finally:
        before.__exit__(None, None, None)
    with pytest.raises(ValueError, match="limits: mode is 'off'"):
        ascend.limits("off")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        ascend.npu_swiglu(randn(8, 4).t())


NONSENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "half-width cos": (lambda: ascend.npu_rotary_mul(randn(1, 3, 2, 8), randn(1, 3, 1, 4), randn(1, 3, 1, 4)), "full"),
    "sin unlike cos": (lambda: ascend.npu_rotary_mul(randn(1, 3, 2, 8), randn(1, 3, 1, 8), randn(1, 1, 1, 8)), "sin"),
    "odd width": (lambda: ascend.npu_rotary_mul(*[randn(1, 3, 1, 7)] * 3), "even"),
    "rotary_mode": (lambda: ascend.npu_rotary_mul(*[randn(1, 3, 1, 8)] * 3, "quarter"), "rotary_mode"),
    "rotate": (lambda: ascend.npu_rotary_mul(*[randn(1, 3, 1, 8)] * 3, rotate=torch.eye(4)), "rotate"),
    "mode": (lambda: ascend.npu_rotary_position_embedding(*[randn(1, 3, 1, 8)] * 3, 2), "mode"),
    "spelling": (lambda: ascend.npu_mrope(*mrope_arguments(), rotary_mode="interleaved"), "rotary_mode"),
    "cache_mode": (lambda: ascend.npu_mrope(*mrope_arguments(), cache_mode="chunked"), "cache_mode"),
    "head_size": (lambda: ascend.npu_mrope(*mrope_arguments()[:4], 48), "head_size"),
    "layout": (lambda: ascend.npu_apply_rotary_pos_emb(*[randn(1, 2, 1, 64)] * 4, "BSH"), "layout"),
    "odd swiglu": (lambda: ascend.npu_swiglu(randn(2, 7)), "even"),
    "position": (lambda: ascend.npu_mrope(torch.arange(6, 10), *mrope_arguments()[1:]), "position 9 is outside"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_stays_an_error_without_limits(name: str) -> None:
    call, says = NONSENSE[name]
    with ascend.limits("ignore"), pytest.raises(ValueError, match=says):
        call()
