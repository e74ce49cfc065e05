"""The lightning indexer: whose keys are chosen, by which rule, and that every backend chooses the same."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import plant
from scipy import linalg
from test_ops import DEVICE, backends_here, check
from torch import Tensor

from whorl.device import is_interpreting
from whorl.ops import OPS, Op, causal_bounds, dynamic_quant, hadamard, indexer_rope, lightning_indexer
from whorl.ops._rows import ceil_div
from whorl.ops.indexer import index_scores, scores_triton, top_k, top_k_triton

BACKENDS = backends_here(lightning_indexer)
INDEXER, TOP_K = "whorl.ops.indexer.scores_triton", "whorl.ops.indexer.top_k_triton"


def made(tokens: int, keys: int, heads: int, dim: int, topk: int, **case: Any) -> dict[str, Any]:
    """Arguments whose scores are exact in every dtype and order."""
    case = {"dtype": torch.float32, "device": "cpu"} | case
    return lightning_indexer.make(tokens=(tokens,), keys=keys, heads=heads, dim=dim, topk=topk, **case)


def by_sorting(scores: list[float], topk: int, visible: list[int]) -> list[int]:
    """The rule in plain Python: highest first, the lower index among equals; then ascending, padded with -1."""
    best = sorted(visible, key=lambda s: (-scores[s], s))[:topk]
    return sorted(best) + [-1] * (topk - len(best))


def all_rows(scores: Tensor, topk: int, backend: str, end: int | None = None) -> tuple[Tensor, Tensor]:
    """`top_k` with every key visible to every row."""
    ends = torch.full(
        scores.shape[:1], scores.shape[1] if end is None else end, dtype=torch.int32, device=scores.device
    )
    return top_k(scores, topk, torch.zeros_like(ends), ends, backend=backend)


# ---- selection


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "topk"), [(1, 1), (5, 64), (70, 1), (100, 33), (130, 64), (64, 64), (65, 64)])
def test_top_k_is_the_rule(backend: str, width: int, topk: int, device: str) -> None:
    scores = torch.randint(-3, 3, (4, width)).float()
    indices, values = all_rows(scores.to(device), topk, backend)
    for row in range(4):
        expected = by_sorting(scores[row].tolist(), topk, list(range(width)))
        assert indices[row].tolist() == expected
        assert values[row].tolist() == [scores[row, i].item() if i >= 0 else 0 for i in expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_of_either_sign_tie(backend: str, device: str) -> None:
    """All products of a pair may be negative: its score is then 0, with a negative weight -0.0."""
    scores = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0, 0.0, 2.0, -0.0]], device=device)
    assert all_rows(scores, 4, backend)[0].tolist() == [[0, 1, 3, 6]]
    assert all_rows(torch.zeros(1, 40, device=device), 7, backend)[0].tolist() == [list(range(7))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_and_nan_choose_no_garbage(backend: str, device: str) -> None:
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor([[nan, -inf, 1.0, inf, nan, -inf, -3.0, inf]], device=device)
    assert all_rows(scores, 3, backend)[0].tolist() == [[2, 3, 7]]
    indices, values = all_rows(scores, 6, backend)
    assert indices.tolist() == [[0, 1, 2, 3, 6, 7]]
    assert values.tolist() == [[-inf, -inf, 1.0, inf, -3.0, inf]]
    assert all_rows(scores, 9, backend, end=2)[0].tolist() == [[0, 1] + [-1] * 7]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_order_of_magnitude(backend: str, device: str) -> None:
    """A threshold is found by its bits, so all of them must count, denormal numbers included."""
    scores = torch.cat((10.0 ** torch.arange(-44, 38), -(10.0 ** torch.arange(-44, 38))))[torch.randperm(164)]
    for topk in (1, 40, 82, 83, 120, 163):
        expected = by_sorting(scores.tolist(), topk, list(range(164)))
        assert all_rows(scores[None].to(device), topk, backend)[0].tolist() == [expected], topk


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("ties", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_long_rows_are_chosen_from_in_pieces(
    ties: bool, is_few: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows in exact pieces, many in pieces that leave more candidates than are chosen; both longer than a piece."""
    monkeypatch.setattr(top_k_triton, "LONGEST", 1024)
    monkeypatch.setattr(top_k_triton, "HELD", 512)
    monkeypatch.setattr(top_k_triton, "PROGRAMS", 100 if is_few else 0)
    scores = torch.randn(2, 2500, device=device)
    scores = scores.mul(2).round() if ties else scores
    ends = torch.tensor([2500, 2100], dtype=torch.int32, device=device)
    bounds = (torch.tensor([0, 900], dtype=torch.int32, device=device), ends)
    got, expected = (top_k(scores, 100, *bounds, backend=b) for b in ("triton", "torch"))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def _unlike_its_sample(width: int) -> Tensor:
    """The highest lie where a sample does not look: between its runs of neighbours."""
    runs, run = top_k_triton.SAMPLE // top_k_triton.RUN, top_k_triton.RUN
    step = ceil_div(ceil_div(width, runs), run) * run
    return torch.randn(width) + 10.0 * (torch.arange(width) % step >= run)


LONG = 9001
LONG_ROWS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(LONG),
    "mostly zero": lambda: torch.randn(LONG).sub(2).relu(),
    "all equal": lambda: torch.full((LONG,), 3.14159),
    "few values": lambda: torch.randint(0, 3, (LONG,)) * 1.2345,
    "rising": lambda: torch.arange(float(LONG)),
    "falling": lambda: -torch.arange(float(LONG)),
    "unlike its sample": lambda: _unlike_its_sample(LONG),
    "mostly NaN": lambda: torch.randn(LONG).masked_fill(torch.rand(LONG) < 0.99, float("nan")),
    "infinite": lambda: torch.randn(LONG).masked_fill(torch.rand(LONG) < 0.5, float("inf")),
    "nothing": lambda: torch.full((LONG,), float("-inf")),
}


@pytest.mark.parametrize("shuffled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["normal", *(pytest.param(k, marks=pytest.mark.slow) for k in list(LONG_ROWS)[1:])])
def test_a_guessed_threshold_changes_no_choice(
    kind: str, shuffled: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k_triton, "PROGRAMS", 0)  # as with many rows
    scores = torch.stack([LONG_ROWS[kind]() for _ in range(2)]).to(device)
    assert scores.shape[1] > top_k_triton.HELD
    starts = torch.tensor([0, 900], dtype=torch.int32, device=device)
    ends = torch.tensor([LONG, LONG // 2], dtype=torch.int32, device=device)
    positions = torch.randperm(LONG, device=device).int() if shuffled else None
    got, expected = (top_k(scores, 100, starts, ends, positions, backend=b) for b in ("triton", "torch"))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_pieces_are_used_where_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    monkeypatch.setattr(top_k_triton, "_launch", lambda scores, *_: widths.append(scores.shape[1]))
    for rows, width in ((300, 8192), (300, 20_000), (300, 200_000), (2, 8192), (2, 20_000), (2, 200_000)):
        meta, bound = torch.empty(rows, width, device="meta"), torch.empty(rows, device="meta")
        top_k_triton.select(meta, bound, bound, None, *(meta[:, :2048].clone(),) * 2)
    many, few = [8192, 20_000, 4096, 200_000, 7 * 4096, 4096], [8192, 20_000, 3 * 2048, 200_000, 25 * 2048, 7 * 2048]
    assert widths == [*many, *few, 2 * 2048]


# ---- who sees whom


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_see_no_later_key(backend: str, device: str) -> None:
    values = made(6, 6, 4, 16, 4, device=device)
    indices, _ = lightning_indexer(**values, backend=backend)
    for t, row in enumerate(indices.tolist()):
        real = [i for i in row if i >= 0]
        assert len(real) == min(4, t + 1)
        assert max(real) <= t
        assert row == sorted(real) + [-1] * (4 - len(real))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_do_not_see_each_other(backend: str, device: str) -> None:
    lengths = [5, 1, 9]
    values = made(15, 15, 3, 16, 4, device=device)
    cu_seqlens = torch.tensor([0, 5, 6, 15], device=device)
    starts, ends = causal_bounds(15, 15, cu_seqlens=cu_seqlens)
    indices, scores = lightning_indexer(**values | {"starts": starts, "ends": ends}, backend=backend)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        alone = {n: values[n][rows] for n in ("q", "k", "weights")}
        expected, expected_scores = lightning_indexer(**alone, topk=4, backend="torch")
        assert torch.equal(indices[rows], torch.where(expected < 0, expected, expected + first))
        assert torch.equal(scores[rows], expected_scores)
        first += length


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_of_the_queries_chooses_what_the_whole_does(backend: str, device: str) -> None:
    """Context parallelism: head and tail of the sequence on one rank, the keys gathered in order."""
    values = made(24, 24, 3, 16, 5, device=device)
    whole = lightning_indexer(**values, backend="torch")
    mine = torch.tensor([0, 1, 2, 21, 22, 23], device=device)
    starts, ends = causal_bounds(6, 24, positions=mine, device=device)
    part = {"q": values["q"][mine], "k": values["k"], "weights": values["weights"][mine], "topk": 5}
    got = lightning_indexer(**part, starts=starts, ends=ends, backend=backend)
    assert torch.equal(got[0], whole[0][mine])
    assert torch.equal(got[1], whole[1][mine])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_may_lie_in_any_order(backend: str, device: str) -> None:
    """With positions a key is visible by where it belongs; without ties the choice is the same."""
    torch.manual_seed(1)
    q, k, weights = torch.randn(7, 2, 16), torch.randn(40, 16), torch.rand(7, 2)
    starts, ends = causal_bounds(7, 40, positions=torch.tensor([3, 8, 9, 20, 30, 38, 39]))
    expected, _ = lightning_indexer(q, k, weights, 6, starts, ends, backend="torch")
    order = torch.randperm(40)
    moved = [x.to(device) for x in (q, k[order], weights, starts, ends, order.int())]
    indices, _ = lightning_indexer(*moved[:3], 6, *moved[3:], backend=backend)
    back = torch.where(indices.cpu() < 0, 99, order[indices.cpu().clamp_min(0).long()]).sort(-1).values
    assert torch.equal(torch.where(back == 99, -1, back).int(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "keys", "topk"), [(1, 1, 1), (1, 1, 2048), (1, 70, 64), (3, 3, 2048), (2, 0, 4), (5, 3, 64)]
)
def test_small_and_short(backend: str, tokens: int, keys: int, topk: int, device: str) -> None:
    values = made(tokens, keys, 2, 16, topk, device=device)
    indices, scores = lightning_indexer(**values, backend=backend)
    expected = lightning_indexer.reference(**values)
    assert indices.shape == (tokens, topk)
    assert torch.equal(indices, expected[0])
    assert torch.equal(scores, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_nothing(backend: str, device: str) -> None:
    values = made(3, 20, 2, 16, 4, device=device)
    ends = torch.tensor([0, 5, -3], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5, 0], dtype=torch.int32, device=device)
    indices, scores = lightning_indexer(**values | {"starts": starts, "ends": ends}, backend=backend)
    assert (indices == -1).all()
    assert (scores == 0).all()


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
def test_any_number_of_heads(heads: int, device: str) -> None:
    case = {"tokens": (3,), "keys": 40, "heads": heads, "dim": 32, "topk": 1}
    check(index_scores, "triton", index_scores.make(**case, dtype=torch.float32, device=device))
    values = made(3, 40, heads, 32, 7, device=device)
    for got, expected in zip(
        lightning_indexer(**values, backend="triton"), lightning_indexer.reference(**values), strict=True
    ):
        assert torch.equal(got, expected)


def test_the_last_chunk_may_be_short(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    values = made(11, 50, 2, 16, 6, device=device)
    expected = lightning_indexer.reference(**values)
    module = sys.modules["whorl.ops.indexer.bounds"]
    monkeypatch.setattr(module.chunks, "__defaults__", (4 * 50,))
    for backend in BACKENDS:
        for got, right in zip(lightning_indexer(**values, backend=backend), expected, strict=True):
            assert torch.equal(got, right), backend


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of the largest tensor that is made in the block."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, out.numel() if isinstance(out, Tensor) else 0)
        return out


def test_scores_of_a_chunk_are_all_that_is_in_memory() -> None:
    """On the meta device every allocation is seen: none may have a row for each query and a column for each key."""
    values = made(4096, 65536, 4, 32, 64, device="meta")
    with LargestTensor() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores_triton.top_k_triton, "select", lambda *_: None)
        patch.setattr(scores_triton, "_scores_kernel", _Ignore())
        scores_triton.lightning_indexer(**values)
    assert 2**20 < seen.elements <= 2**25


class _Ignore:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


# ---- scores


def test_scores_are_transformers() -> None:
    """Hugging Face's indexer of DeepSeek-V3.2, projections, norm and rotation included."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    from transformers.models.deepseek_v32 import DeepseekV32Config

    config = DeepseekV32Config(
        hidden_size=48, q_lora_rank=24, index_n_heads=4, index_head_dim=32, qk_rope_head_dim=16, index_topk=7,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    theirs = deepseek.DeepseekV32Indexer(config, 0).double()
    torch.nn.init.normal_(theirs.k_norm.bias)
    hidden, residual = torch.randn(1, 20, 48).double(), torch.randn(1, 20, 24).double()
    angles = torch.arange(20)[:, None] * 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    tables = tuple(torch.cat((t, t), -1)[None].double() for t in cos_sin.chunk(2, -1))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[None]
    expected = theirs(hidden, residual, tables, mask, torch.arange(20)[None])[0]

    q = theirs.wq_b(residual)[0].view(20, 4, 32).detach()
    k = theirs.k_norm(theirs.wk(hidden))[0].detach()
    weights = theirs.weights_proj(hidden)[0].detach() * 4**-0.5 * 32**-0.5
    before = q
    q, k = indexer_rope(q, k, cos_sin.double())
    indices, _ = lightning_indexer(q, k, weights, 7)
    for t in range(20):
        seen = {s for s in expected[t].tolist() if s <= t}
        assert {s for s in indices[t].tolist() if s >= 0} == seen, t
    wrong, _ = lightning_indexer(*indexer_rope(before, k, cos_sin.double(), interleaved=True), weights, 7)
    assert not torch.equal(wrong, indices)


def test_rope_turns_the_first_channels_in_halves() -> None:
    q, k = torch.randn(3, 2, 12), torch.randn(3, 12)
    angles = torch.rand(3, 4)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    turned, turned_k = indexer_rope(q, k, cos_sin)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    torch.testing.assert_close(turned[..., :4], q[..., :4] * cos - q[..., 4:8] * sin)
    torch.testing.assert_close(turned[..., 8:], q[..., 8:])
    torch.testing.assert_close(turned_k[:, :4], k[:, :4] * cos[:, 0] - k[:, 4:8] * sin[:, 0])
    pairs, _ = indexer_rope(q, k, cos_sin, interleaved=True)
    torch.testing.assert_close(pairs[..., 0], q[..., 0] * cos[..., 0] - q[..., 1] * sin[..., 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_scores_are_those_of_the_rounded_numbers(backend: str, device: str) -> None:
    q, k, weights = torch.randn(4, 3, 32), torch.randn(50, 32), torch.randn(4, 3)
    q8, q_scale = dynamic_quant(q.to(device), format="fp8", backend="torch")
    k8, k_scale = dynamic_quant(k.to(device), format="fp8", backend="torch")
    weights = weights.to(device) * q_scale
    scores = index_scores(q8, k8, weights, k_scale=k_scale, backend=backend)
    expected = index_scores.reference(q8.double(), k8.double(), weights.double(), k_scale=k_scale.double())
    is_hopper = backend == "triton" and device == "cuda"  # its tensor cores add products of fp8 with 14 bits
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=4e-3 if is_hopper else 1e-5)
    full = index_scores.reference(q, k, weights.cpu() / q_scale.cpu())
    assert (scores.cpu() - full).norm() < 0.06 * full.norm()
    indices, _ = lightning_indexer(q8, k8, weights, 5, k_scale=k_scale, backend=backend)
    assert torch.equal(indices, top_k.reference(scores, 5)[0])


def test_a_common_hadamard_transform_changes_no_choice() -> None:
    q, k, weights = torch.randn(5, 3, 64).double(), torch.randn(30, 64).double(), torch.randn(5, 3).double()
    plain, turned = index_scores(q, k, weights), index_scores(hadamard(q), hadamard(k), weights)
    torch.testing.assert_close(turned, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(k)), k, rtol=1e-12, atol=1e-12)


def test_hadamard_is_scipys_matrix() -> None:
    matrix = torch.from_numpy(linalg.hadamard(16)).double()
    assert torch.equal(hadamard(torch.eye(16).double(), 1.0), matrix)


def test_hadamard_makes_fp8_scores_better() -> None:
    """What it is for: where a few channels are large, their rounding is nearly all of a score's error."""
    q, k = torch.randn(64, 128), torch.randn(64, 128)
    q[:, :4] *= 30
    k[:, :4] *= 30

    def rounded(x: Tensor) -> Tensor:
        codes, scale = dynamic_quant(x, format="fp8")
        return codes.float() * scale[:, None]

    def error(q: Tensor, k: Tensor) -> float:
        return (rounded(q) @ rounded(k).T - q @ k.T).norm().item()

    assert hadamard(q).abs().max() < 0.5 * q.abs().max()
    assert error(hadamard(q), hadamard(k)) < 0.5 * error(q, k)


# ---- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(5, 9)}, r"lightning_indexer: k is \[5, 9\] torch.float32, expected \[S, 16\] torch.float32"),
        ({"k": torch.zeros(5, 16).half()}, "k is .* torch.float16, expected .* torch.float32"),
        ({"weights": torch.zeros(3, 9)}, r"weights is \[3, 9\] torch.float32, expected \[3, 2\]"),
        ({"topk": 0}, "topk is 0, expected a positive number"),
        ({"starts": torch.zeros(3, dtype=torch.int32)}, "starts or key_positions is given without ends; pass both"),
        ({"ends": torch.zeros(3)}, r"ends is \[3\] torch.float32, expected \[3\] torch.int32"),
        ({"k_scale": torch.zeros(3)}, r"k_scale is \[3\] torch.float32, expected \[5\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lightning_indexer(**(made(3, 5, 2, 16, 4) | change))


def test_gradients_are_refused() -> None:
    values = made(3, 5, 2, 16, 4)
    values["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        lightning_indexer(**values)
    with torch.no_grad():
        lightning_indexer(**values)


def test_bounds_of_a_slice() -> None:
    starts, ends = causal_bounds(4, 10)
    assert (starts.tolist(), ends.tolist()) == ([0] * 4, [7, 8, 9, 10])
    positions = torch.tensor([2, 3, 4, 9])
    starts, ends = causal_bounds(4, 10, cu_seqlens=torch.tensor([0, 3, 3, 10]), positions=positions)
    assert (starts.tolist(), ends.tolist()) == ([0, 3, 3, 3], [3, 4, 5, 10])
    with pytest.raises(ValueError, match=r"positions is \[4\], expected \[5\]"):
        causal_bounds(5, 10, positions=positions)


# ---- the tests, tested

SIGN = "tl.where(signed < 0, -2147483648, "
FAULTS = {
    "wrong tie rule: the first of equals passed over": (
        TOP_K,
        "(equals < missing)",
        "((equals >= 1) & (equals <= missing))",
    ),
    "one equal too many": (TOP_K, "(equals < missing)", "(equals <= missing)"),
    "equals left out": (TOP_K, "(equals < missing)", "(equals < 0)"),
    "a bit kept that too few reach": (TOP_K, "tl.where(is_enough, threshold | bit, threshold)", "threshold | bit"),
    "negative scores in reverse": (TOP_K, SIGN + "-1)", SIGN + "-2147483648)"),
    "start ignored": (TOP_K, "inside & (first + at >= start)", "inside"),
    "positions ignored": (TOP_K, "inside & (positions >= start) & (positions < stop)", "inside"),
    "tail not written": (TOP_K, "(unused >= num_chosen)", "(unused > num_chosen)"),
    "no ReLU": (INDEXER, "tl.maximum(dots, 0.0) * weights", "dots * weights"),
    "weights of the first query": (INDEXER, "weights_ptr + token.to(tl.int64)", "weights_ptr + 0 * token.to(tl.int64)"),
    "a block of keys lost": (INDEXER, "(highest >= first_start)", "(highest > first_start + 32)"),
}


QUICK = {"one equal too many", "equals left out", "no ReLU", "a block of keys lost"}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [pytest.param(*f, id=name, marks=[] if name in QUICK else [pytest.mark.slow]) for name, f in FAULTS.items()],
)
def test_a_planted_fault_is_found(
    module: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(module, old, new, 1, tmp_path, monkeypatch)
    assert first_red(OPS["top_k" if module == TOP_K else "index_scores"]) is not None


def first_red(op: Op) -> str | None:
    """What the shared check says of the first case that it rejects."""
    for case in op.cases:
        try:
            check(op, "triton", op._bind((), op.make(**case, dtype=torch.float32, device=DEVICE)))
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.skipif(is_interpreting(), reason="bf16 at full size, for the GPU")
def test_real_sizes() -> None:
    values = made(256, 32768, 64, 128, 2048, dtype=torch.bfloat16, device="cuda")
    first, second = lightning_indexer(**values), lightning_indexer(**values)
    expected = lightning_indexer.reference(**values)
    for got, again, right in zip(first, second, expected, strict=True):
        assert torch.equal(got, again)
        assert torch.equal(got, right)
