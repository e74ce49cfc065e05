"""The indexer's loss: against autograd of the formula in fp64, on awkward rows, and under checkpointing."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import plant
from test_indexer import LargestTensor
from test_ops import DEVICE, backends_here, check
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from whorl.ops import OPS, Op, causal_bounds, indexer_kl_loss
from whorl.ops.indexer import indexer_kl, indexer_kl_gradients, indexer_target
from whorl.ops.sparse_attention.cases import select

BACKENDS = backends_here(indexer_kl)
PACKAGE = "whorl.ops.indexer"
SCALE = 0.3
Values = dict[str, Any]


def inputs(tokens: int = 5, keys: int = 32, heads: int = 4, k: int = 10, dtype: torch.dtype = torch.float64) -> Values:
    """An indexer, the attention that it learns from, and a choice of keys with one short row."""
    q, index_k = torch.randn(tokens, heads, 8, dtype=dtype), torch.randn(keys, 8, dtype=dtype)
    weights, main_q = torch.randn(tokens, heads, dtype=dtype), torch.randn(tokens, 6, 12, dtype=dtype)
    main_k = torch.randn(keys, 1, 12, dtype=dtype)
    indices = torch.rand(tokens, keys).topk(k).indices.sort(-1).values.int()
    indices[1:2, 4:] = -1
    values = {"q": q, "k": index_k, "weights": weights, "indices": indices, "main_q": main_q, "main_k": main_k}
    return values | {"main_lse": lse_of(values)}


def logits_of(v: Values) -> Tensor:
    """[T, H, S] of the main attention, -inf outside the choice."""
    logits = torch.einsum("thd,sd->ths", v["main_q"], v["main_k"][:, 0]) * SCALE
    return logits.masked_fill(~chosen(v)[:, None], -torch.inf)


def chosen(v: Values) -> Tensor:
    mask = torch.zeros(len(v["indices"]), len(v["k"]) + 1, dtype=torch.bool)
    at = torch.where(v["indices"] < 0, len(v["k"]), v["indices"]).long()
    return mask.scatter_(1, at, True)[:, :-1]


def lse_of(v: Values) -> Tensor:
    return logits_of(v).logsumexp(-1)


def formula(v: Values) -> Tensor:
    """The report's definition on dense matrices, by torch alone: KL of each row."""
    mask = chosen(v)
    scores = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", v["q"], v["k"]).relu(), v["weights"])
    log_q = F.log_softmax(scores.masked_fill(~mask, -torch.inf), -1).masked_fill(~mask, 0)
    p = torch.softmax(logits_of(v), -1).sum(1)
    p = (p / p.sum(-1, keepdim=True)).detach()
    return F.kl_div(log_q, p, reduction="none").sum(-1)


def gradients(
    loss: Callable[[Values], Tensor], v: Values, names: tuple[str, ...] = ("q", "k", "weights")
) -> list[Tensor]:
    leaves = v | {n: v[n].detach().requires_grad_() for n in names}
    return list(torch.autograd.grad(loss(leaves), [leaves[n] for n in names], allow_unused=True))


def our_loss(v: Values, **options: Any) -> Tensor:
    return indexer_kl_loss(**v, scale=SCALE, **options)


# ---- the formula


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_loss_and_gradients_are_the_formulas(reduction: str, when: str) -> None:
    v, log = inputs(), torch.zeros(1, dtype=torch.float64)

    def expected(v: Values) -> Tensor:
        return 0.7 * getattr(formula(v), reduction)()

    def got(v: Values) -> Tensor:
        return our_loss(v, coefficient=0.7, reduction=reduction, when=when, log=log)

    for g, e in zip(gradients(got, v), gradients(expected, v), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(log[0], expected(v))
    if when == "forward":
        torch.testing.assert_close(got(v), expected(v), check_dtype=False)


def test_dense_loss_is_the_formula_over_visible_keys() -> None:
    v = inputs(tokens=9, keys=9, k=9)
    v["indices"] = torch.where(torch.arange(9) <= torch.arange(9)[:, None], torch.arange(9), -1).int()
    v["main_lse"] = lse_of(v)
    dense = v | {"indices": None}
    for g, e in zip(
        gradients(lambda v: indexer_kl_loss(**v, scale=SCALE, reduction="sum"), dense),
        gradients(lambda v: formula(v).sum(), v),
        strict=True,
    ):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_dense_equals_sparse_where_everything_is_selected() -> None:
    v = inputs(tokens=6, keys=20, k=20)
    v["indices"] = torch.arange(20).int().repeat(6, 1)
    v["main_lse"] = lse_of(v)
    ends = torch.full((6,), 20, dtype=torch.int32)
    dense = v | {"indices": None} | {"starts": torch.zeros_like(ends), "ends": ends}
    sparse = gradients(our_loss, v)
    for g, e in zip(gradients(lambda v: indexer_kl_loss(**v, scale=SCALE), dense), sparse, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_dense_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    v = inputs(tokens=9, keys=12)
    dense = v | {"indices": None}
    starts, ends = causal_bounds(9, 12, cu_seqlens=torch.tensor([0, 5, 12]))
    loss = lambda v: indexer_kl_loss(**v, starts=starts, ends=ends, scale=SCALE)  # noqa: E731
    whole = gradients(loss, dense)
    monkeypatch.setattr(sys.modules[f"{PACKAGE}.bounds"].chunks, "__defaults__", (2 * 12,))
    for g, e in zip(gradients(loss, dense), whole, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-14)


def test_dense_loss_has_no_matrix_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 queries and 128 keys, four queries at a time: nothing of 128 x 128 elements is ever made."""
    v = inputs(tokens=128, keys=128)
    dense = v | {"indices": None}
    monkeypatch.setattr(sys.modules[f"{PACKAGE}.bounds"].chunks, "__defaults__", (4 * 128,))

    with LargestTensor() as seen:
        indexer_kl_loss(**dense, scale=SCALE)
    assert 4 * 128 <= seen.elements < 128 * 128


def test_a_perfect_indexer_has_no_loss() -> None:
    v = inputs(heads=1)
    v["main_q"], v["main_k"] = v["q"].abs(), v["k"].abs()[:, None]
    v["q"], v["k"] = v["main_q"], v["main_k"][:, 0]
    v["weights"] = torch.full((5, 1), SCALE, dtype=torch.float64)
    v["main_lse"] = lse_of(v)
    assert our_loss(v).abs() < 1e-12
    assert all(g.abs().max() < 1e-12 for g in gradients(our_loss, v))


def test_no_gradient_reaches_the_main_model() -> None:
    main = ("main_q", "main_k", "main_lse")
    for when in ("forward", "backward"):
        actual = gradients(lambda v: our_loss(v, when=when) + v["q"].sum() * 0, inputs(), ("q", *main))  # noqa: B023
        assert actual[1:] == [None] * 3


def test_heads_are_summed_before_they_are_normalised() -> None:
    """With a sink or a window the heads' masses on the chosen keys differ: each must count by its mass."""
    v = inputs()
    v["main_lse"] = v["main_lse"] + torch.arange(6).double()  # head 5 leaves most of its attention elsewhere
    target = indexer_target(v["main_q"], v["main_k"], v["indices"], v["main_lse"], SCALE)
    each = torch.exp(logits_of(v) - v["main_lse"].unsqueeze(-1))
    gathered = each.sum(1).gather(1, v["indices"].clamp_min(0).long()).masked_fill(v["indices"] < 0, 0)
    torch.testing.assert_close(target, gathered)
    per_head = (each / each.sum(-1, keepdim=True)).sum(1).gather(1, v["indices"].clamp_min(0).long())
    assert not torch.allclose(target / target.sum(-1, keepdim=True), per_head / 6, atol=1e-3)


def test_targets_of_several_ranks_are_added() -> None:
    """Tensor parallelism: each rank has some heads; the sum of all is normalised, once."""
    v = inputs()
    halves = [v | {n: v[n][:, part] for n in ("main_q", "main_lse")} for part in (slice(0, 3), slice(3, 6))]
    other = indexer_target(halves[1]["main_q"], v["main_k"], v["indices"], halves[1]["main_lse"], SCALE)
    got = gradients(lambda v: our_loss(v, reduce_target=lambda target: target + other), halves[0])
    for g, e in zip(got, gradients(our_loss, v), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_a_slice_of_the_queries_add_up(ranks: int) -> None:
    """Context parallelism: with "sum" and one coefficient for all, the ranks' gradients add to the whole's."""
    v = inputs(tokens=8)
    whole = gradients(lambda v: our_loss(v, reduction="sum", coefficient=1 / 8), v)
    parts = []
    for rank in range(ranks):
        rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        mine = {n: x if n in ("k", "main_k") else x[rows] for n, x in v.items()}
        parts.append(gradients(lambda v: our_loss(v, reduction="sum", coefficient=1 / 8), mine))
    torch.testing.assert_close(sum(p[1] for p in parts), whole[1])
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), whole[0])


# ---- once, also under checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_it_once(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    call = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *a, **k: (calls.append(op.name), call(op, *a, **k))[1])
    v, log = inputs(), torch.zeros(1)

    def layer(q: Tensor) -> Tensor:
        return our_loss(v | {"q": q * 2}, when="backward", log=log)

    q = v["q"].clone().requires_grad_()
    loss = checkpoint(layer, q, use_reentrant=use_reentrant)
    assert calls == []
    assert loss == 0
    loss.backward()
    assert calls == ["indexer_kl_gradients"]
    (expected,) = gradients(lambda x: our_loss(v | {"q": x["q"] * 2}), {"q": v["q"]}, ("q",))
    torch.testing.assert_close(q.grad, expected)
    torch.testing.assert_close(log[0].double(), our_loss(v | {"q": v["q"] * 2}).double(), rtol=1e-5, atol=1e-6)


def test_forward_keeps_gradients_and_computes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = sys.modules[f"{PACKAGE}.kl"]
    op = indexer_kl_gradients
    monkeypatch.setattr(module, op.name, lambda *a, **k: (calls.append(1), op(*a, **k))[1])
    gradients(our_loss, inputs())
    assert calls == [1]


def test_the_upstream_gradient_counts() -> None:
    v = inputs()
    for when in ("forward", "backward"):
        tripled = gradients(lambda v: our_loss(v, when=when) * 3, v)  # noqa: B023
        for g, e in zip(tripled, gradients(our_loss, v), strict=True):
            torch.testing.assert_close(g, 3 * e)


def test_gradients_keep_their_dtypes() -> None:
    v = inputs(dtype=torch.float32)
    v |= {n: v[n].bfloat16() for n in ("q", "k", "main_q", "main_k")}
    assert [g.dtype for g in gradients(our_loss, v)] == [torch.bfloat16, torch.bfloat16, torch.float32]


# ---- awkward rows


def awkward() -> dict[str, Values]:
    more = {"dtype": torch.float32, "device": "cpu"}
    cases = {
        "one query, one key": indexer_kl.make(tokens=(1,), keys=1, heads=1, dim=8, k=1, **more),
        "an empty row": indexer_kl.make(tokens=(3,), keys=20, heads=2, dim=16, k=9, empty=True, **more),
        "more slots than keys": indexer_kl.make(tokens=(2,), keys=3, heads=2, dim=16, k=64, **more),
        "nothing selected": indexer_kl.make(tokens=(2,), keys=5, heads=2, dim=16, k=40, **more),
        "no mass": indexer_kl.make(tokens=(2,), keys=20, heads=2, dim=16, k=9, **more),
        "first block empty": indexer_kl.make(tokens=(2,), keys=80, heads=2, dim=16, k=40, **more),
        "mass on one key": indexer_kl.make(tokens=(2,), keys=20, heads=2, dim=16, k=9, **more),
        "huge scores": indexer_kl.make(tokens=(2,), keys=20, heads=2, dim=16, k=9, **more),
    }
    cases["nothing selected"]["indices"].fill_(-1)
    cases["nothing selected"]["target"].zero_()
    cases["no mass"]["target"].zero_()
    cases["first block empty"]["indices"][0, :32] = -1
    cases["first block empty"]["target"].masked_fill_(cases["first block empty"]["indices"] < 0, 0)
    cases["mass on one key"]["target"][:, 1:] = 0
    cases["huge scores"]["weights"] *= 1e4
    return cases


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "k", "counts"),
    [
        *((2, 20, heads, 9, (9, 4)) for heads in (1, 8, 16, 32, 64, 128)),
        (1, 1, 2, 1, (1,)),
        (1, 1, 2, 64, (1,)),
        (3, 33, 3, 1, (1, 0, 1)),
        (2, 33, 3, 2048, (33, 0)),
        (2, 90, 5, 64, (64, 33)),
        (2, 7, 3, 64, (0, 0)),
    ],
    ids=str,
)
def test_kernels_are_the_formulas_derivative(
    tokens: int, keys: int, heads: int, k: int, counts: tuple[int, ...], deterministic: bool, device: str
) -> None:
    """Every size against torch's derivative of the formula in fp64: the loss, dq, dk and dweights."""
    v = inputs(tokens, keys, heads, k=min(k, keys))
    v["indices"] = select(tokens, keys, k, counts, device="cpu")
    v["main_lse"] = lse_of(v)
    kept = [t for t, count in enumerate(counts) if count]
    some = {n: x if n in ("k", "main_k") else x[kept] for n, x in v.items()}
    expected = formula(some).sum() if kept else torch.zeros((), dtype=torch.float64)
    on_device = {n: x.to(device, torch.float32) if x.is_floating_point() else x.to(device) for n, x in v.items()}
    main = [on_device[n] for n in ("main_q", "main_k", "indices", "main_lse")]
    target = indexer_target(*main, SCALE, backend="triton")
    indexer_inputs = {n: on_device[n] for n in ("q", "k", "weights", "indices")}
    loss, *got = indexer_kl(**indexer_inputs, target=target, deterministic=deterministic, backend="triton")
    torch.testing.assert_close(loss.sum().cpu().double(), expected, rtol=1e-4, atol=1e-5)
    grads = gradients(lambda x: formula(x).sum(), some) if kept else [None] * 3
    for name, g, e in zip(("q", "k", "weights"), got, grads, strict=True):
        right = torch.zeros_like(v[name])
        if e is not None:
            right[slice(None) if name == "k" else kept] = e
        torch.testing.assert_close(g.cpu().double(), right, rtol=1e-4, atol=2e-5)


def unread(device: str) -> Values:
    """Rows with padding; the first and the last key are NaN and nobody's choice."""
    values = indexer_kl.make(tokens=(3,), keys=20, heads=2, dim=16, k=5, dtype=torch.float32, device=device)
    values["indices"] = torch.tensor([[3, 5, 7, -1, -1], [2, -1, -1, -1, -1], [-1] * 5]).int().to(device)
    values["target"].masked_fill_(values["indices"] < 0, 0)
    values["k"][[0, -1]] = float("nan")
    return values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_that_are_not_selected_are_not_read(deterministic: bool, backend: str, device: str) -> None:
    results = indexer_kl(**unread(device) | {"deterministic": deterministic}, backend=backend)
    assert all(not x.isnan().any() for x in results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", awkward())
def test_awkward_rows(name: str, deterministic: bool, backend: str, device: str) -> None:
    torch.manual_seed(0)
    values = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in awkward()[name].items()}
    values["deterministic"] = deterministic
    got = loss, dq, dk, dweights = indexer_kl(**values, backend=backend)
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in values.items()}
    for g, right in zip(got, indexer_kl.reference(**wide), strict=True):
        torch.testing.assert_close(g.double(), right, rtol=1e-4, atol=1e-5 * max(1.0, right.abs().max().item()))
    idle = (values["indices"] < 0).all(-1) | (values["target"].sum(-1) == 0)
    assert not loss[idle].any()
    assert not dq[idle].any()
    assert not dweights[idle].any()
    assert (loss >= -1e-4).all()
    unused = torch.ones(len(values["k"]), dtype=torch.bool, device=device)
    unused[values["indices"][~idle].clamp_min(0).long().unique()] = False
    assert not dk[unused].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_that_see_nothing_are_left_out(backend: str, device: str) -> None:
    values = indexer_kl.make(tokens=(4,), keys=20, heads=2, dim=16, empty=True, dtype=torch.float32, device=device)
    assert values["ends"][0] == 0
    values["target"][2] = 0  # and one whose attention is all elsewhere
    loss, dq, dk, _ = indexer_kl(**values, backend=backend)
    assert not loss[[0, 2]].any()
    assert not dq[[0, 2]].any()
    assert not dk[values["ends"].max() :].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_visible_key_has_no_loss(backend: str, device: str) -> None:
    values = indexer_kl.make(tokens=(1,), keys=1, heads=1, dim=8, dtype=torch.float32, device=device)
    assert values["indices"] is None
    assert all(x.abs().max() < 1e-6 for x in indexer_kl(**values, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
def test_any_number_of_main_heads(heads: int, backend: str, device: str) -> None:
    more = {"dtype": torch.float32, "device": device}
    check(indexer_target, backend, indexer_target.make(tokens=(2,), keys=20, heads=heads, dim=24, k=9, **more))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_row_of_attention_gives_no_nan(backend: str, device: str) -> None:
    """`sparse_attention` gives -inf for the lse of a query without keys."""
    values = indexer_target.make(
        tokens=(3,), keys=9, heads=2, dim=16, k=4, empty=True, dtype=torch.float32, device=device
    )
    values["lse"][-1] = -torch.inf
    target = indexer_target(**values, backend=backend)
    assert target.isfinite().all()
    assert not target[-1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_gives_the_same_bits(backend: str, device: str) -> None:
    case = {"tokens": (6,), "keys": 30, "heads": 4, "dim": 16, "k": 20, "deterministic": True}
    values = indexer_kl.make(**case, dtype=torch.bfloat16, device=device)
    first = indexer_kl(**values, backend=backend)
    for _ in range(3 if device == "cpu" else 10):
        assert all(torch.equal(a, b) for a, b in zip(first, indexer_kl(**values, backend=backend), strict=True))


def test_attention_and_indexer_must_be_of_the_same_tokens() -> None:
    v = inputs()
    message = r"q and k have 5 queries and 31 keys, main_q and main_k 5 and 32, expected the same"
    with pytest.raises(ValueError, match=message):
        our_loss(v | {"k": v["k"][:31], "indices": v["indices"].clamp_max(30)})
    dense = v | {"indices": None}
    with pytest.raises(ValueError, match=message):
        indexer_kl_loss(**dense | {"k": v["k"][:31]}, scale=SCALE)


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "max"}, "reduction is 'max', expected one of mean, sum"),
        ({"when": "later"}, "when is 'later', expected one of forward, backward"),
        ({"log": torch.zeros(2)}, r"log is \[2\], expected one element"),
        ({"indices": torch.full((5, 3), 32).int()}, "indices has values from 32 to 32, expected -1 to 31"),
        ({"indices": torch.zeros(5, 3)}, r"indices is \[5, 3\] torch.float32, expected \[5, 3\] torch.int32"),
        (
            {"main_k": torch.zeros(32, 2, 12, dtype=torch.float64)},
            r"indexer_kl_gradients: main_k is \[32, 2, 12\] torch.float64, expected \[32, 1, 12\] with indices",
        ),
        (
            {"starts": torch.zeros(5).int(), "ends": torch.ones(5).int()},
            "indexer_kl_gradients: indices and bounds are given, expected bounds only where indices is None",
        ),
        ({"indices": None, "starts": torch.zeros(5).int()}, "starts or key_positions is given without ends"),
        ({"indices": None, "ends": torch.zeros(4).int()}, r"ends is \[4\] torch.int32, expected \[5\] torch.int32"),
        (
            {"main_k": torch.zeros(32, 12)},
            r"indexer_kl_gradients: main_k is \[32, 12\] torch.float32, expected \[32, HK > 0, 12\] torch.float64",
        ),
        ({"main_lse": torch.zeros(5, 2)}, r"lse is \[5, 2\] torch.float32, expected \[5, G\*HK\]"),
        (
            {"k": torch.zeros(32, 9)},
            r"indexer_kl_gradients: k is \[32, 9\] torch.float32, expected \[S, 8\] torch.float64",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options: Values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        our_loss(inputs() | options)


# ---- the tests, tested

LOGITS, NO_KEY = "tl.exp(logits * scale", "scores = tl.where(valid, scores, "
MASS = "inverse = tl.div_rn(has_mass, tl.where("
FAULTS = {
    "indexer_target": {
        "KL target normalised per head": (f"{LOGITS} - lse[None, :])", f"{LOGITS}) / tl.sum({LOGITS}), 0)[None, :]"),
        "only the last heads": ("if first_head > 0:", "if first_head < 0:"),
    },
    "indexer_kl": {
        "missing -1 guard": (NO_KEY + 'float("-inf"))', NO_KEY + "0.0)"),
        "target not normalised": (MASS + "mass > 0, mass, 1.0))", "inverse = has_mass"),
        "ReLU's derivative forgotten": ("tl.where(dots > 0, (ds", "tl.where(dots == dots, (ds"),
        "sign of the gradient": ("tl.exp(log_q) - p, 0.0)", "p - tl.exp(log_q), 0.0)"),
        "scale of dk": ("WIDEN) * (grad_scale / LIFT)", "WIDEN) * (1.0 / LIFT)"),
        "second block forgotten": ("dweights += dscores", "dweights = dscores"),
    },
    "indexer_target, dense": {
        "heads of the keys": ("head // (H // HK) * k_stride_h", "head % HK * k_stride_h"),
        "who sees whom": ("total = tl.where(visible, total, 0.0)", "total = total * 1.0"),
    },
    "indexer_kl, dense": {
        "target not normalised, dense": (MASS + "all_mass > 0, all_mass, 1.0))", "inverse = has_mass"),
        "keys' gradient": ("before + dk * (grad_scale / LIFT)", "before + dk * (1.0 / LIFT)"),
    },
}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [pytest.param(op, *texts, id=name) for op, faults in FAULTS.items() for name, texts in faults.items()],
)
def test_a_planted_fault_is_found(
    name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, dense = name.partition(", ")
    short = "dense_kl_triton" if dense else "kl_triton"
    short = "key_gradient_triton" if old.startswith("before + dk") else short
    module = importlib.import_module(f"{PACKAGE}.{short}").__name__
    plant(module, old, new, 1, tmp_path, monkeypatch)
    op = OPS[name]
    more = {"grad_scale": 0.5} if name.endswith("_kl") else {}
    cases = [{"tokens": (2,), "keys": 20, "heads": 20, "dim": 16, "k": 17, "empty": True}, *op.cases]
    assert any(is_red(op, op.make(**case | more, dtype=torch.float32, device=DEVICE)) for case in cases)


def is_red(op: Op, values: Values) -> bool:
    try:
        check(op, "triton", op._bind((), values))
    except (AssertionError, ZeroDivisionError):  # the latter: an error where the right answer is 0
        return True
    return False
