"""The operators of inference: bits that do not depend on neighbours, and parity with code that we did not write."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_ops import backends_here
from torch import Tensor

from whorl.device import is_interpreting
from whorl.ops import OPS, experts, linear, paged_attention, penalize, route, sample, write_kv
from whorl.ops.moe.route import NO_GROUPS
from whorl.ops.sample import _near, gumbel

DTYPES = (torch.float32, torch.bfloat16)


def backends(name: str, slow: bool = False) -> list[Any]:
    """Those that run here; `slow`: interpreted kernels only where all tests run."""
    mark = [pytest.mark.slow] if slow and is_interpreting() else []
    return [pytest.param(b, marks=mark if b == "triton" else []) for b in backends_here(OPS[name])]


def is_slow(backend: str) -> bool:
    return backend == "triton" and is_interpreting()


def assert_equal_bits(got: Tensor, expected: Tensor, what: str) -> None:
    wrong = (got != expected).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"{what}: rows {wrong} of {len(got)} differ"


def subsets(count: int) -> list[list[int]]:
    """Rows alone, first, last, in the middle, reversed, shuffled, repeated."""
    every = list(range(count))
    return [[0], [count - 1], every[:2], every[3:10], every[::-1], every[1::3], every * 2, [every[-1]] + every[:-1]]


def assert_rows_stand_alone(run: Callable[[list[int]], Tensor], count: int, ways: list[list[int]]) -> None:
    """`run` computes the rows it is given; each row's bits must be those it has among all."""
    whole = run(list(range(count)))
    for way in ways:
        assert_equal_bits(run(way), whole[way], f"{len(way)} rows from {way[:3]}")


# ---- linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", backends("linear"))
def test_linear_rows_stand_alone(backend: str, dtype: torch.dtype, device: str) -> None:
    sizes = [(24, 70)] if is_slow(backend) else [(576, 1536), (33, 100), (1536, 576)]
    count = 11 if is_slow(backend) else 71
    for n, k in sizes:
        x, weight = (torch.randn(m, k, device=device).to(dtype) for m in (count, n))
        ways = subsets(count)[:4] if is_slow(backend) else subsets(count) + [list(range(m)) for m in range(5, 40, 9)]
        assert_rows_stand_alone(lambda i: linear(x[i], weight, backend=backend), count, ways)  # noqa: B023


def test_sums_cut_by_the_number_of_rows_would_fail() -> None:
    """What tiles of one size are for: a product that cuts its sums otherwise for more rows, as many a BLAS does."""
    x, weight = torch.randn(77, 768), torch.randn(1536, 768)

    def cut(i: list[int]) -> Tensor:
        at = 64 * (1 + len(i) % 11)
        return x[i, :at] @ weight[:, :at].T + x[i, at:] @ weight[:, at:].T

    with pytest.raises(AssertionError, match=r"rows .* differ"):
        assert_rows_stand_alone(cut, 77, subsets(77))


def test_linear_is_torchs() -> None:
    x, weight, bias = torch.randn(40, 96).double(), torch.randn(50, 96).double(), torch.randn(50).double()
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x, weight, bias), expected, rtol=1e-12, atol=1e-12)


# ---- paged attention


def paged(
    queries: list[int],
    contexts: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    block: int = 8,
    dtype: torch.dtype = torch.float32,
) -> SimpleNamespace:
    """Sequences with known keys and values, stored in shuffled blocks; what is not theirs is huge."""
    counts = [math.ceil(c / block) for c in contexts]
    free = torch.randperm(sum(counts) + 5).tolist()
    caches = [torch.full((len(free), block, kv_heads, dim), 3e4).to(dtype) for _ in range(2)]
    tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int32)
    ks, vs = ([torch.randn(c, kv_heads, dim).to(dtype) for c in contexts] for _ in range(2))
    for b, length in enumerate(contexts):
        mine = [free.pop() for _ in range(counts[b])]
        tables[b, : len(mine)] = torch.tensor(mine)
        slots = torch.tensor([mine[i // block] * block + i % block for i in range(length)])
        write_kv(ks[b], vs[b], *caches, slots, backend="torch")
    qs = [torch.randn(n, heads, dim).to(dtype) for n in queries]
    return SimpleNamespace(qs=qs, ks=ks, vs=vs, k_cache=caches[0], v_cache=caches[1], tables=tables, contexts=contexts)


def attend(p: SimpleNamespace, parts: list[tuple[int, int, int]], device: str, **options: Any) -> list[Tensor]:
    """One call for (sequence, first query, number of queries) each; queries end where the context does."""
    q = torch.cat([p.qs[b][i : i + n] for b, i, n in parts])
    starts = np.cumsum([0] + [n for _, _, n in parts])
    lengths = [p.contexts[b] - len(p.qs[b]) + i + n for b, i, n in parts]
    whole = [torch.tensor(x, dtype=torch.int32) for x in (starts.tolist(), lengths)]
    values = [q, p.k_cache, p.v_cache, p.tables[[b for b, _, _ in parts]], *whole]
    scale = options.pop("scale", p.qs[0].shape[-1] ** -0.5)
    out = paged_attention(*(v.to(device) for v in values), scale=scale, **options)
    return list(out.split([n for _, _, n in parts]))


def dense(p: SimpleNamespace, b: int, window: int = 0) -> Tensor:
    """torch's own attention, in fp64."""
    q, k, v = (x.double().transpose(0, 1) for x in (p.qs[b], p.ks[b], p.vs[b]))
    position = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    key = torch.arange(k.shape[1])
    visible = (key <= position) & ((key > position - window) if window else True)
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1)


SHAPES = [
    {"heads": 4, "kv_heads": 4, "dim": 32},
    {"heads": 9, "kv_heads": 3, "dim": 64},
    {"heads": 8, "kv_heads": 1, "dim": 40, "block": 16},
    {"heads": 4, "kv_heads": 2, "dim": 128, "block": 4},
    {"heads": 16, "kv_heads": 2, "dim": 16, "block": 1},
]


@pytest.mark.parametrize("window", [0, 1, 13, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", backends("paged_attention", slow=True))
def test_attention_is_torchs(backend: str, shape: dict[str, int], window: int, device: str) -> None:
    longest = 70 if is_slow(backend) else 600
    p = paged([3, 1, 5, 9], [3, longest, 40, 21], **shape)
    out = attend(p, [(b, 0, len(q)) for b, q in enumerate(p.qs)], device, window=window, backend=backend)
    for b, got in enumerate(out):
        torch.testing.assert_close(got.double().cpu(), dense(p, b, window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("backend", backends("paged_attention", slow=True))
def test_a_prompt_may_be_cut_anywhere(backend: str, window: int, dtype: torch.dtype, device: str) -> None:
    """Same bits whole, in chunks, beside other sequences, and token by token."""
    length = 40 if is_slow(backend) else 290
    p = paged([length, 7], [length, 20], heads=6, kv_heads=2, dim=32, dtype=dtype)
    options = {"window": window, "backend": backend}
    whole = attend(p, [(0, 0, length)], device, **options)[0]
    for cuts in ([1, 12],) if is_slow(backend) else ([1, 2, 40, 41, 200, 289], [32, 256], range(50, length, 50)):
        bounds = [0, *cuts, length]
        parts = [attend(p, [(1, 0, 7), (0, i, end - i)], device, **options)[1] for i, end in itertools.pairwise(bounds)]
        assert_equal_bits(torch.cat(parts), whole, f"cut at {list(cuts)}")
    for i in (0, 1, 37, length - 1):
        assert_equal_bits(attend(p, [(0, i, 1)], device, **options)[0], whole[i : i + 1], f"token {i} alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("backend", backends("paged_attention", slow=True))
def test_decoded_tokens_stand_alone(backend: str, window: int, dtype: torch.dtype, device: str) -> None:
    """Same bits one at a time, as a draft of several, in any batch."""
    contexts = [130, 40] if is_slow(backend) else [600, 40, 258, 6]
    p = paged([6] * len(contexts), contexts, heads=6, kv_heads=2, dim=32, dtype=dtype)
    options = {"window": window, "backend": backend}
    together = attend(p, [(b, 0, 6) for b in range(len(contexts))], device, **options)
    for b in range(len(contexts)):
        alone = torch.cat([attend(p, [(b, i, 1)], device, **options)[0] for i in range(6)])
        assert_equal_bits(alone, together[b], f"sequence {b}")
        three = attend(p, [(b, 2, 3), (0, 0, 1)], device, **options)[0]
        assert_equal_bits(three, together[b][2:5], f"draft of sequence {b}")


@pytest.mark.parametrize("backend", backends("paged_attention"))
def test_padding_rows_are_zero(backend: str, device: str) -> None:
    p = paged([2], [5])
    q = torch.cat([p.qs[0], torch.randn(3, 4, 32)])
    tensors = [q, p.k_cache, p.v_cache, p.tables, *(torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [5]))]
    out = paged_attention(*(t.to(device) for t in tensors), scale=1.0, backend=backend)
    assert out[:2].abs().min() > 0
    assert not out[2:].any()


def test_attention_is_hugging_faces() -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    p = paged([9], [21], heads=8, kv_heads=2, dim=16)
    q, k, v = (x[0].transpose(0, 1)[None] for x in (p.qs, p.ks, p.vs))
    mask = torch.full((9, 21), -torch.inf).triu(21 - 9 + 1)[None, None]
    module = SimpleNamespace(num_key_value_groups=4, training=False)
    expected = eager_attention_forward(module, q, k, v, mask, scaling=0.3)[0][0]
    got = attend(p, [(0, 0, 9)], "cpu", scale=0.3)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", backends("write_kv"))
def test_write_kv(backend: str, device: str) -> None:
    k, v = torch.randn(4, 2, 8, device=device), torch.randn(4, 2, 8, device=device)
    caches = [torch.zeros(3, 4, 2, 8, device=device) for _ in range(2)]
    slots = torch.tensor([5, -1, 11, 0], device=device)
    assert write_kv(k, v, *caches, slots, backend=backend) is None
    for cache, x in zip(caches, (k, v), strict=True):
        expected = torch.zeros(12, 2, 8, device=device)
        expected[[5, 11, 0]] = x[[0, 2, 3]]
        assert torch.equal(cache.view(12, 2, 8), expected)


# ---- routing and experts

GROUPED = [backend for backend in backends_here(OPS["route"]) if backend != "cpp"]


@pytest.mark.parametrize("backend", backends("route"))
def test_routing_ties_go_to_the_lowest_id(backend: str, device: str) -> None:
    logits = torch.tensor([[1.0, 3, 2, 3, 3, 0], [0, 0, 0, 0, 0, 0], [5, 1, 1, 1, 1, 9]], device=device)
    weights, ids = route(logits, 4, backend=backend)
    assert ids.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3], [5, 0, 1, 2]]
    torch.testing.assert_close(weights.sum(1), torch.ones(3, device=device))
    _, all_ids = route(logits, 6, backend=backend)
    assert all_ids.tolist()[0] == [1, 3, 4, 2, 0, 5]
    _, one = route(logits, 1, backend=backend, scoring="sigmoid")
    assert one.flatten().tolist() == [1, 0, 5]


@pytest.mark.parametrize("backend", GROUPED)
def test_equal_groups_go_to_the_first(backend: str, device: str) -> None:
    _, grouped = route(torch.zeros(1, 6, device=device), 3, num_groups=3, top_groups=2, backend=backend)
    assert grouped.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("backend", backends("route", slow=True))
@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid"}, {"num_groups": 4, "top_groups": 2}], ids=str)
def test_routed_rows_stand_alone(backend: str, options: dict[str, Any], device: str) -> None:
    if backend == "cpp" and "num_groups" in options:
        pytest.skip(NO_GROUPS)
    count = 12 if is_slow(backend) else 50
    logits = torch.randn(count, 60, device=device)
    for output in range(2):
        run = lambda i: route(logits[i], 7, backend=backend, **options)[output]  # noqa: B023, E731
        assert_rows_stand_alone(run, count, subsets(count)[: 4 if is_slow(backend) else 8])


@pytest.mark.parametrize("backend", backends("route"))
def test_routing_is_hugging_faces(backend: str, device: str) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    for renormalize in (True, False):
        config = Qwen3MoeConfig(hidden_size=16, num_experts=24, num_experts_per_tok=5, norm_topk_prob=renormalize)
        router = Qwen3MoeTopKRouter(config)
        router.weight.data.normal_()
        x = torch.randn(11, 16)
        _, expected, ids = router(x)
        raw = torch.nn.functional.linear(x, router.weight)
        got = route(raw.detach().to(device), 5, renormalize=renormalize, backend=backend)
        torch.testing.assert_close(got[0].cpu(), expected.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(got[1].cpu().long(), ids)


@pytest.mark.parametrize("backend", GROUPED)
def test_routing_in_groups_is_hugging_faces(backend: str, device: str) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=32, num_experts_per_tok=6, n_group=8, topk_group=3, moe_intermediate_size=8
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.copy_(torch.rand(32))
    with torch.no_grad():
        logits, expected, ids = router(torch.randn(13, 16))
    got = route(
        logits.to(device),
        6,
        router.e_score_correction_bias.to(device),
        scoring="sigmoid",
        num_groups=8,
        top_groups=3,
        scale=config.routed_scaling_factor,
        backend=backend,
    )
    order, expected_order = got[1].cpu().long().sort(1), ids.sort(1)
    assert torch.equal(order.values, expected_order.values)
    torch.testing.assert_close(
        got[0].cpu().gather(1, order.indices), expected.gather(1, expected_order.indices), rtol=1e-6, atol=1e-7
    )


def expert_arguments(count: int, k: int = 3, hidden: int = 32, width: int = 24, number: int = 6) -> list[Tensor]:
    x, gate_up = torch.randn(count, hidden), torch.randn(number, 2 * width, hidden) / hidden**0.5
    down = torch.randn(number, hidden, width) / width**0.5
    weights, ids = route(torch.randn(count, number), k, backend="torch")
    return [x, gate_up, down, weights, ids]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", backends("experts"))
def test_expert_rows_stand_alone(backend: str, dtype: torch.dtype, device: str) -> None:
    count = 9 if is_slow(backend) else 45
    small, large = {"k": 2, "hidden": 16, "width": 8}, {"hidden": 576, "width": 192, "number": 8}
    more = small if is_slow(backend) else large
    x, gate_up, down, weights, ids = (t.to(device) for t in expert_arguments(count, **more))
    x, gate_up, down = (t.to(dtype) for t in (x, gate_up, down))
    ways = subsets(count)[:4] if is_slow(backend) else subsets(count)
    run = lambda i: experts(x[i], gate_up, down, weights[i], ids[i], backend=backend)  # noqa: E731
    assert_rows_stand_alone(run, count, ways)


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("backend", backends("experts", slow=True))
def test_experts_are_hugging_faces(backend: str, k: int, device: str) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, num_experts=6, num_experts_per_tok=k, moe_intermediate_size=24, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.2)
    x = torch.randn(1, 19, 32)
    with torch.no_grad():
        expected = block(x)
        expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
        weights, ids = route(linear(x[0], block.gate.weight), k)
        values = [x[0], block.experts.gate_up_proj, block.experts.down_proj, weights, ids]
        got = experts(*(v.detach().to(device) for v in values), backend=backend)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-6)


# ---- sampling


def settings(count: int, device: str = "cpu", **changes: Any) -> dict[str, Tensor]:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "steps": 0}
    plain["top_n_sigma"] = 0.0
    kinds = {"top_k": torch.int64, "seeds": torch.int64, "steps": torch.int64}
    made = {n: torch.as_tensor(changes.get(n, v), dtype=kinds.get(n, torch.float32)) for n, v in plain.items()}
    return {n: v.expand(count).contiguous().to(device) for n, v in made.items()}


@pytest.mark.parametrize("backend", backends("sample"))
def test_greedy_takes_the_lowest_of_equals(backend: str, device: str) -> None:
    logits = torch.tensor([[0.0, 2, 2, 1], [3, 3, 3, 3], [-9, -8, -torch.inf, -8]], device=device)
    assert sample(logits, **settings(3, device, temperature=0.0), backend=backend).tolist() == [1, 0, 1]


def allowed_tokens(backend: str, device: str, probabilities: list[float], **changes: Any) -> set[int]:
    """All the tokens that many draws give."""
    count = 60 if is_slow(backend) else 300
    logits = torch.tensor(probabilities, device=device).log().expand(count, -1)
    return set(
        sample(logits, **settings(count, device, seeds=torch.arange(count), **changes), backend=backend).tolist()
    )


EDGES = [
    ({}, {0, 1, 2, 3, 4}),
    ({"top_k": 1}, {0}),
    ({"top_k": 2}, {0, 1}),
    ({"top_k": 3}, {0, 1, 2, 3}),  # 2 and 3 are equal: both stay
    ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.0}, {0}),
    ({"top_p": 0.35}, {0}),
    ({"top_p": 0.45}, {0, 1}),
    ({"top_p": 0.75}, {0, 1, 2, 3}),
    ({"top_p": 0.99}, {0, 1, 2, 3, 4}),
    ({"min_p": 1.0}, {0}),
    ({"min_p": 0.7}, {0, 1}),
    ({"min_p": 0.3}, {0, 1, 2, 3}),
    ({"top_k": 2, "top_p": 0.55}, {0}),  # 0.4 of the remaining 0.7
    ({"top_p": 0.75, "min_p": 0.6}, {0, 1}),
    ({"temperature": 0.01}, {0}),
    ({"top_n_sigma": 0.01}, {0}),  # one standard deviation of the logits is 0.736
    ({"top_n_sigma": 0.5}, {0, 1}),
    ({"top_n_sigma": 2.0}, {0, 1, 2, 3}),
    ({"top_n_sigma": 2.0, "temperature": 3.0}, {0, 1, 2, 3}),
    ({"top_n_sigma": 3.0}, {0, 1, 2, 3, 4}),
    ({"top_n_sigma": 2.0, "top_p": 0.72}, {0, 1}),  # 0.7 of the remaining 0.95
    ({"top_n_sigma": 0.5, "top_k": 3}, {0, 1}),
]


@pytest.mark.parametrize(("changes", "expected"), EDGES, ids=str)
@pytest.mark.parametrize("backend", backends("sample", slow=True))
def test_which_tokens_may_be_chosen(backend: str, changes: dict[str, Any], expected: set[int], device: str) -> None:
    actual = allowed_tokens(backend, device, [0.4, 0.3, 0.125, 0.125, 0.05], **changes)
    assert actual <= expected if is_slow(backend) else actual == expected


@pytest.mark.parametrize("backend", backends("sample", slow=True))
def test_excluded_tokens_do_not_widen_the_deviation(backend: str, device: str) -> None:
    """A grammar's minus infinities are no logits."""
    probabilities = [0.4, 0.3, 0.125, 0.125, 0.05, *[0.0] * 300]
    assert allowed_tokens(backend, device, probabilities, top_n_sigma=0.5) <= {0, 1}


def chi_square(seen: Tensor, expected: Tensor) -> float:
    """Probability of counts at least this far from the expected ones; the rarest are counted together."""
    rare = expected < 8
    seen, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    distance = ((seen - expected).square() / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), distance / 2).item()


def is_gumbel(x: Tensor) -> bool:
    """Kolmogorov-Smirnov at one in ten thousand."""
    levels = torch.exp(-torch.exp(-x.sort().values))
    steps = torch.arange(len(x) + 1) / len(x)
    distance = torch.maximum((levels - steps[:-1]).abs(), (levels - steps[1:]).abs()).max()
    return distance.item() * len(x) ** 0.5 < 2.225


def test_top_n_sigma_of_a_row_does_not_depend_on_other_rows() -> None:
    """A row is cut where it is cut alone: torch divides the sums of large tensors among its threads."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(8, 151_936)
    below = logits.amax(-1, keepdim=True) - logits
    edges = below.sort(-1).values[:, 500] / logits.std(-1, correction=0)  # a token that is just kept, or just not
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for ulps in range(-6, 7):
            sigmas = (edges.view(torch.int32) + ulps).view(torch.float32)
            together = _near(logits, sigmas)
            for row in range(8):
                one = slice(row, row + 1)
                assert torch.equal(together[one], _near(logits[one], sigmas[one]))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("temperature", "vary"), [(0.5, "seeds"), (2.0, "steps")])
def test_the_distribution(temperature: float, vary: str, device: str) -> None:
    """Chi-square against the softmax in fp64; with top-k and top-p, against what is left of it."""
    count, logits = 4000, torch.randn(12) * 0.8
    draws = {vary: torch.arange(count), "temperature": temperature}
    for cut in ({}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.15}, {"top_n_sigma": 1.3}):
        expected = torch.softmax(logits.double() / temperature, 0)
        ranked, order = expected.sort(descending=True)
        keep = torch.ones(12, dtype=torch.bool)
        keep &= torch.arange(12) < cut.get("top_k", 12)
        keep &= ranked.cumsum(0) - ranked < cut.get("top_p", 2.0)
        keep &= ranked >= cut.get("min_p", 0.0) * ranked[0]
        keep &= logits.max() - logits[order] <= cut.get("top_n_sigma", 99.0) * logits.std(correction=0)
        expected[order[~keep]] = 0
        expected /= expected.sum()
        got = sample(logits.expand(count, -1).to(device), **settings(count, device, **draws, **cut)).cpu()
        seen = torch.bincount(got, minlength=12)
        assert not seen[expected == 0].any()
        inside = expected > 0
        assert chi_square(seen[inside], expected[inside] * count) > 1e-4


def test_the_noise_is_gumbel_and_independent() -> None:
    step = torch.tensor([3])
    noise = [gumbel(torch.tensor([seed]), step, 40000)[0].double() for seed in (0, 1, 2**40, 2**40 + 1, -5)]
    for one in noise:
        assert is_gumbel(one)
    for other in [*noise[1:], gumbel(step * 0, step + 1, 40000)[0].double(), noise[0].roll(1)]:
        assert abs(np.corrcoef(noise[0].numpy(), other.numpy())[0, 1]) < 0.02
    rows = gumbel(torch.arange(4000), step.expand(4000), 2).double()
    assert is_gumbel(rows[:, 0])
    assert not is_gumbel(rows[:, 0] * 1.2)
    assert abs(np.corrcoef(rows.numpy().T)[0, 1]) < 0.06


@pytest.mark.parametrize("backend", backends("sample", slow=True))
def test_a_request_samples_alike_in_any_batch(backend: str, device: str) -> None:
    count = 6
    logits = 2 * torch.randn(count, 300, device=device)
    batch = settings(count, device, seeds=torch.arange(count), steps=5, top_p=0.9, top_k=40)
    batch["temperature"] = torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0, 0.2], device=device)
    whole = sample(logits, **batch, backend=backend)
    for way in ([0], [5, 0], [3, 3, 1], [5, 4, 3, 2, 1, 0]):
        got = sample(logits[way], **{n: v[way] for n, v in batch.items()}, backend=backend)
        assert torch.equal(got, whole[way])


def test_penalties() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, seen = torch.randn(2, 20), torch.tensor([[3, 7, 3, 1], [0, 2, 2, 2]])
    tokens, counts = torch.tensor([[1, 3, 7, -1], [0, 2, 9, 11]]), torch.tensor([[1, 2, 0, 0], [0, 3, -1, -1]])
    got = penalize(logits, tokens, counts, repetition=torch.tensor([1.3, 1.3]))
    torch.testing.assert_close(got, RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone()))
    bias = torch.tensor([[0.0, 0, 0, 9], [0, 0, -100, 5]])
    rates = {"presence": torch.tensor([0.5, 0.25]), "frequency": torch.tensor([0.1, 0.2])}
    got = penalize(logits, tokens, counts, bias=bias, vocab_size=18, **rates)
    expected = logits.clone()
    expected[0, 1] -= 0.5 + 0.1
    expected[0, 3] -= 0.5 + 0.2
    expected[1, 2] -= 0.25 + 0.6
    expected[1, 9] -= 100
    expected[1, 11] += 5
    expected[:, 18:] = -torch.inf
    torch.testing.assert_close(got, expected)
    nothing = penalize(logits, torch.full((2, 3), -1), torch.zeros(2, 3, dtype=torch.int64), **rates)
    assert torch.equal(nothing, logits)
    assert torch.equal(penalize(logits, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0)), logits)


# ---- refusals

x3, w3 = torch.randn(2, 8), torch.randn(3, 8)
REFUSED = [
    (lambda: linear(x3, torch.randn(3, 7)), r"linear: weight is \[3, 7\] torch.float32, expected \[N, 8\]"),
    (lambda: linear(x3, w3.half()), r"linear: weight is .* torch.float16, expected"),
    (lambda: linear(x3, w3, torch.randn(4)), r"linear: bias is \[4\]"),
    (lambda: route(torch.randn(2, 8), 9), "route: k is 9, expected 1 to 8"),
    (lambda: route(torch.randn(2, 8), 3, num_groups=3), "route: num_groups is 3 and top_groups 1 for 8 experts"),
    (lambda: route(torch.randn(2, 8), 5, num_groups=2, top_groups=1), "route: k is 5, expected 1 to 4"),
    (lambda: experts(torch.randn(2, 9), *expert_arguments(2)[1:]), r"experts: gate_up is \[6, 48, 32\]"),
    (lambda: sample(torch.randn(2, 8).int(), **settings(2)), "sample: logits is"),
    (lambda: sample(torch.randn(2, 8), **settings(3)), r"sample: temperature is \[3\] torch.float32, expected \[2\]"),
    (lambda: attend(paged([1], [3], heads=3), [(0, 0, 1)], "cpu"), r"paged_attention: q is .*, expected \[1, G\*2, "),
    (lambda: attend(paged([1], [3]), [(0, 0, 1)], "cpu", window=-1), "paged_attention: window is -1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()
