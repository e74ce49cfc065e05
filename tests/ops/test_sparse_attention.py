"""Sparse and masked attention: against torch's own attention, on every awkward selection, with faults planted."""

import functools
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from planted import Fault, first_red, one_of_each_quick, plant
from test_ops import DEVICE, arguments, check, num_rows
from torch import Tensor

from whorl.bench.ops import workspace
from whorl.ops import OPS, causal_bounds, indexer_kl_loss, lightning_indexer, sparse_attention
from whorl.ops._op import Values
from whorl.ops.sparse_attention import choose_attention, launch, masked_attention, selection_mask
from whorl.ops.sparse_attention.cases import DEEPSEEK, MLA_SCALE, select

PLAIN, MASKED = "whorl.ops.sparse_attention.triton", "whorl.ops.sparse_attention.masked_triton"
SPARSE, BACKWARD = "sparse_attention", "sparse_attention_backward"
MASKED_BACKWARD = "masked_attention_backward"


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]


def selected(indices: Tensor, num_keys: int) -> Tensor:
    """[T, S] bool."""
    mask = torch.zeros(indices.shape[0], num_keys + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(1, torch.where(indices < 0, num_keys, indices).long(), True)[:, :-1]


# ---- against attention that is not ours


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_is_torchs_attention_under_the_mask(backend: str) -> None:
    dtype = torch.float64 if backend == "torch" else torch.float32
    q, kv = tensors((6, 4, 48), (30, 1, 48), dtype=dtype)
    indices = select(6, 30, 11, device=DEVICE)
    out, lse = sparse_attention(q, kv, indices, 0.2, value_dim=32, backend=backend)
    mask = selected(indices, 30)
    keys, values = kv.expand(-1, 4, -1).transpose(0, 1), kv[..., :32].expand(-1, 4, -1).transpose(0, 1)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.2)
    torch.testing.assert_close(out, expected.transpose(0, 1))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * 0.2).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1).T)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masked_is_torchs_attention_under_the_mask(backend: str) -> None:
    dtype = torch.float64 if backend == "torch" else torch.float32
    q, k, v = tensors((6, 4, 24), (70, 2, 24), (70, 2, 16), dtype=dtype)
    indices = select(6, 70, 40, device=DEVICE)
    out, _ = masked_attention(q, k, v, selection_mask(indices, 70), 0.2, backend=backend)
    parts = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*parts, attn_mask=selected(indices, 70), scale=0.2, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(0, 1))


def test_absorbed_mla_is_ordinary_attention_of_its_heads() -> None:
    """Scores of q W_UK against latents, at the scale of a head's 192 channels, and W_UV behind: the same result."""
    heads, nope, rope, latent, value, count = 4, 128, 64, 512, 128, 5
    q_nope, q_rope, c, k_rope = tensors((count, heads, nope), (count, heads, rope), (9, latent), (9, rope))
    w_k, w_v = (0.05 * w for w in tensors((heads, latent, nope), (heads, latent, value)))
    indices = select(count, 9, 6, (6, 1, 3, 6, 2), device=DEVICE)
    keys = torch.cat((torch.einsum("sl,hln->shn", c, w_k), k_rope[:, None].expand(-1, heads, -1)), -1)
    values = torch.einsum("sl,hlv->shv", c, w_v)
    ordinary, lse = masked_attention(
        torch.cat((q_nope, q_rope), -1), keys, values, selection_mask(indices, 9), (nope + rope) ** -0.5
    )
    absorbed = torch.cat((torch.einsum("thn,hln->thl", q_nope, w_k), q_rope), -1)
    latents, absorbed_lse = sparse_attention(
        absorbed, torch.cat((c, k_rope), -1)[:, None], indices, MLA_SCALE, value_dim=latent
    )
    torch.testing.assert_close(torch.einsum("thl,hlv->thv", latents, w_v), ordinary)
    torch.testing.assert_close(absorbed_lse, lse)


def test_a_packed_batch_is_its_sequences_one_by_one() -> None:
    """Choice, attention and the indexer's loss, with all gradients; a batch is a packed stream of equal lengths."""
    lengths, heads = [5, 1, 9], 3
    count = sum(lengths)
    leaves = [
        x.requires_grad_() for x in tensors((count, heads, 24), (count, 1, 24), (count, 2, 8), (count, 8), (count, 2))
    ]
    dout = torch.randn(count, heads, 16, dtype=torch.float64, device=DEVICE)

    def run(
        q: Tensor, kv: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, dout: Tensor, **bounds: Tensor
    ) -> Tensor:
        with torch.no_grad():
            indices, _ = lightning_indexer(index_q, index_k, weights, 4, **bounds)
        out, lse = sparse_attention(q, kv, indices, 0.3, value_dim=16)
        main = (index_q, index_k, weights, indices, q, kv, lse)
        return (out * dout).sum() + indexer_kl_loss(*main, scale=0.3, reduction="sum")

    edges = torch.tensor([0, *lengths]).cumsum(0)
    starts, ends = causal_bounds(count, count, cu_seqlens=edges.to(DEVICE))
    packed = run(*leaves, dout, starts=starts, ends=ends)
    parts = [slice(a, b) for a, b in itertools.pairwise(edges.tolist())]
    alone = sum(run(*(x[part] for x in leaves), dout[part]) for part in parts)
    torch.testing.assert_close(packed, alone)
    for got, expected in zip(torch.autograd.grad(packed, leaves), torch.autograd.grad(alone, leaves), strict=True):
        torch.testing.assert_close(got, expected)


# ---- selections that have broken such kernels


def run_both(q: Tensor, kv: Tensor, indices: Tensor, value_dim: int, deterministic: bool = False) -> list[list[Tensor]]:
    """out, lse, dq and dkv, by the kernels and by torch's derivative of the reference in fp64."""
    dout, dlse = tensors((*q.shape[:2], value_dim), tuple(q.shape[:2]), dtype=q.dtype)
    out, lse = sparse_attention(q, kv, indices, 0.3, value_dim=value_dim, backend="triton")
    more = {"scale": 0.3, "deterministic": deterministic, "backend": "triton"}
    got = [out, lse, *OPS[BACKWARD](dout, q, kv, indices, out, lse, dlse, **more)]
    leaves = [x.double().requires_grad_() for x in (q, kv)]
    expected = sparse_attention.reference(*leaves, indices, 0.3, value_dim=value_dim)
    grads = torch.autograd.grad(expected, leaves, (dout.double(), dlse.double()))
    return [got, [*(x.detach() for x in expected), *grads]]


def assert_alike(got: list[Tensor], expected: list[Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        assert not g.isnan().any()
        torch.testing.assert_close(g.double(), e.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
def test_any_number_of_heads(heads: int) -> None:
    """Two tokens with different keys: a tile of heads must not mix them."""
    q, kv = tensors((2, heads, 24), (20, 1, 24), dtype=torch.float32)
    indices = select(2, 20, 18, (18, 7), device=DEVICE)
    assert_alike(*run_both(q, kv, indices, 16, deterministic=heads == 8))


def run_masked(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> list[list[Tensor]]:
    """out, lse, dq, dk and dv, by the kernels and by torch's derivative of the reference in fp64."""
    bits = selection_mask(indices, k.shape[0])
    dout, dlse = tensors((*q.shape[:2], v.shape[2]), tuple(q.shape[:2]), dtype=q.dtype)
    outputs = []
    for run, wide in (
        (functools.partial(masked_attention, backend="triton"), q.dtype),
        (masked_attention.reference, torch.float64),
    ):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        results = run(*leaves, bits, 0.3)
        grads = torch.autograd.grad(results, leaves, (dout.to(wide), dlse.to(wide)))
        outputs.append([*(x.detach() for x in results), *grads])
    return outputs


@pytest.mark.parametrize(
    ("heads", "key_heads"),
    [
        (1, 1),
        (16, 2),
        *(pytest.param(*many, marks=pytest.mark.slow) for many in ((8, 8), (32, 1), (64, 64), (128, 16))),
    ],
)
def test_any_number_of_masked_heads(heads: int, key_heads: int) -> None:
    q, k, v = tensors((2, heads, 24), (20, key_heads, 24), (20, key_heads, 16), dtype=torch.float32)
    assert_alike(*run_masked(q, k, v, select(2, 20, 18, (18, 7), device=DEVICE)))


@pytest.mark.parametrize(("keys", "topk"), [(1, 1), (1, 64), (33, 1), (33, 2048), (100, 64)])
@pytest.mark.parametrize("counts", [(), (0,)], ids=["all of them", "none"])
def test_any_number_of_masked_keys(keys: int, topk: int, counts: tuple[int, ...]) -> None:
    q, k, v = tensors((1, 2, 17), (keys, 2, 17), (keys, 2, 13), dtype=torch.float32)
    got, expected = run_masked(q, k, v, select(1, keys, topk, counts, device=DEVICE))
    assert_alike(got, expected)
    assert not counts or not any(x.any() for x in (got[0], *got[2:]))


@pytest.mark.parametrize(
    ("keys", "topk"),
    [(1, 1), (1, 64), (33, 1), (33, 2048), (200, 64), pytest.param(2100, 2048, marks=pytest.mark.slow)],
)
def test_any_number_of_keys(keys: int, topk: int) -> None:
    q, kv = tensors((1, 2, 16), (keys, 1, 16), dtype=torch.float32)
    indices = select(1, keys, topk, device=DEVICE)
    assert_alike(*run_both(q, kv, indices, 16))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 5, 0), (70, 0, 1)])
def test_rows_without_keys_are_zero(counts: tuple[int, ...], deterministic: bool) -> None:
    q, kv = tensors((3, 3, 20), (80, 1, 20), dtype=torch.float32)
    indices = select(3, 80, 70, counts, device=DEVICE)
    got, expected = run_both(q, kv, indices, 16, deterministic)
    assert_alike(got, expected)
    empty = torch.tensor([c == 0 for c in counts], device=DEVICE)
    assert not got[0][empty].any()
    assert not got[2][empty].any()
    assert (got[1][empty] == float("-inf")).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_that_are_not_selected_are_not_read(deterministic: bool) -> None:
    """Padding points nowhere: not at the first key, whose NaN would come back as 0 * NaN, and not before it."""
    q, kv = tensors((2, 2, 16), (40, 1, 16), dtype=torch.float32)
    kv[0] = kv[-1] = float("nan")
    indices = torch.full((2, 70), -1, dtype=torch.int32, device=DEVICE)
    indices[0, :30] = torch.arange(1, 31)
    got, _ = run_both(q, kv, indices, 16, deterministic)
    assert all(not x.isnan().any() for x in got)
    assert not got[3][0].any()


def check_low_scores() -> None:
    """A row whose scores are all near -200: padding, which scores 0 where it is not shut out, would outweigh them."""
    q, kv = torch.full((1, 1, 16), 8.0, device=DEVICE), torch.full((3, 1, 16), -5.0, device=DEVICE)
    kv += 0.1 * torch.randn_like(kv)
    indices = torch.tensor([[0, 2, -1]], dtype=torch.int32, device=DEVICE)
    assert_alike(*run_both(q, kv, indices, 16))


def test_padding_does_not_outweigh_low_scores() -> None:
    check_low_scores()


@pytest.mark.parametrize("first", [31, 32, 64, 128, 199])
def test_the_first_blocks_may_be_masked(first: int) -> None:
    q, k, v = tensors((3, 2, 16), (200, 2, 16), (200, 2, 16), dtype=torch.float32)
    indices = torch.full((3, 4), -1, dtype=torch.int32, device=DEVICE)
    indices[0, 0], indices[2, 0] = first, 199
    bits = selection_mask(indices, 200)
    results = []
    for backend, wide in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out, lse = masked_attention(*leaves, bits, 0.3, backend=backend)
        grads = torch.autograd.grad((out.square().sum(), lse[::2].sum()), leaves)
        results.append([out, lse, *grads])
    assert_alike(*results)


def test_a_backward_in_many_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = tensors((5, 2, 24), (10, 1, 24), dtype=torch.float32)
    indices = select(5, 10, 8, device=DEVICE)
    for deterministic in (False, True):
        monkeypatch.setattr(launch, "SCRATCH", 2 * 2 * 2 * 64 * 4)  # P and dS of two tokens
        assert_alike(*run_both(q, kv, indices, 16, deterministic))


def test_scratch_memory_is_bounded_in_every_shape() -> None:
    """Of few selected keys many tokens go at a time; the place of each key in each of them counts as well."""
    for heads, dim, topk, keys in ((16, 64, 64, 32768), (1, 16, 1, 131072), (128, 576, 2048, 32768)):
        job = SimpleNamespace(heads=heads, dim=dim, topk=topk, num_keys=keys, count=2**20, deterministic=True)
        job.q, job.pitch = torch.empty(1, dtype=torch.bfloat16, device=DEVICE), -(-topk // 64) * 64
        tokens = launch._Backward._tokens_at_a_time(job)  # type: ignore[arg-type]
        each = (4 * keys, 4 * topk * dim, 4 * heads * job.pitch)
        assert max(each) * tokens <= launch.SCRATCH


def test_deterministic_gradients_have_the_same_bits_ten_times() -> None:
    q, kv = tensors((20, 4, 32), (12, 1, 32), dtype=torch.float32)
    indices = select(20, 12, 8, device=DEVICE)
    dout = torch.randn(20, 4, 16, device=DEVICE)
    out, lse = sparse_attention(q, kv, indices, 0.3, value_dim=16)
    backward = OPS[BACKWARD]
    times = 10 if DEVICE == "cuda" else 2
    runs = [
        backward(dout, q, kv, indices, out, lse, scale=0.3, deterministic=True, backend="triton") for _ in range(times)
    ]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_torchs_switch_asks_for_the_deterministic_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    impl = OPS[BACKWARD].impls["triton"]
    monkeypatch.setitem(
        OPS[BACKWARD].impls,
        "triton",
        type(impl)("triton", lambda **v: modes.append(v["deterministic"]) or impl.function(**v), impl.accepts),
    )
    q, kv = tensors((1, 1, 16), (3, 1, 16), dtype=torch.float32)
    for switch in (True, False):
        torch.use_deterministic_algorithms(switch, warn_only=True)
        indices = select(1, 3, 2, device=DEVICE)
        out, _ = sparse_attention(q.requires_grad_(), kv, indices, 1.0, backend="triton")
        out.sum().backward()
    assert modes == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
def test_hopper_kernels_agree_with_the_plain_ones(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"tokens": (9,), "keys": 4096, "topk": 2048, "heads": heads, "dim": 576, "value_dim": 512}
    case |= {"counts": (2048, 2047, 1, 0, 65, 128, 129, 64, 2000)}
    for name in ("sparse_attention", "sparse_attention_backward"):
        for deterministic in (False, True):
            values = arguments(OPS[name], case | {"deterministic": deterministic}, torch.bfloat16)
            assert launch.hopper_reason(heads, 576, 512, torch.bfloat16, values["q"].device) is None
            check(OPS[name], "triton", values)
            with monkeypatch.context() as context:
                context.setattr(launch, "hopper_reason", lambda *_: "not now")
                check(OPS[name], "triton", values)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_hopper_kernels_read_selected_keys_only(deterministic: bool) -> None:
    q, kv = tensors((4, 64, 576), (300, 1, 576), dtype=torch.bfloat16)
    kv[0] = kv[-1] = float("nan")
    indices = torch.full((4, 256), -1, dtype=torch.int32, device=DEVICE)
    for row, count in enumerate((256, 65, 1)):
        indices[row, :count] = torch.arange(1, count + 1)
    assert launch.hopper_reason(64, 576, 512, torch.bfloat16, q.device) is None
    out, lse = sparse_attention(q, kv, indices, MLA_SCALE, value_dim=512, backend="triton")
    more = {"scale": MLA_SCALE, "deterministic": deterministic, "backend": "triton"}
    dq, dkv = OPS[BACKWARD](torch.randn_like(out), q, kv, indices, out, lse, **more)
    assert all(not x.isnan().any() for x in (out, lse, dq, dkv))
    assert not dkv[0].any()
    assert not dkv[257:].any()


def deepseek_backward(tokens: int, keys: int, deterministic: bool) -> Values:
    case = {"tokens": (tokens,), "keys": keys, "deterministic": deterministic, **DEEPSEEK}
    return OPS[BACKWARD].make(**case, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.gpu
def test_ten_deterministic_backwards_of_real_size_have_the_same_bits() -> None:
    values = deepseek_backward(2048, 8192, True)
    first = OPS[BACKWARD](**values, backend="triton")
    for _ in range(9):
        again = OPS[BACKWARD](**values, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_of_32k_tokens_takes_a_tenth_of_its_results_beside_them(deterministic: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    call = functools.partial(OPS[BACKWARD], **deepseek_backward(32768, 32768, deterministic), backend="triton")
    measured = workspace(OPS[BACKWARD], call, DEVICE)
    assert measured["result_bytes"] > 32768 * 128 * 576 * 2
    assert measured["workspace_bytes"] <= 0.1 * measured["result_bytes"]


# ---- errors and choices


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 5], "indices has values from 0 to 5, expected -1 to 4"),
        ([-2, 1], "indices has values from -2 to 1, expected -1 to 4"),
        ([3, 1], "row 0 of indices does not ascend"),
        ([2, 2], "row 0 of indices does not ascend"),
        ([-1, 2], "a key after a -1"),
    ],
)
def test_wrong_indices_are_refused(row: list[int], message: str) -> None:
    q, kv = torch.randn(1, 1, 16), torch.randn(5, 1, 16)
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, kv, torch.tensor([row], dtype=torch.int32), 1.0)


def test_wrong_shapes_are_refused() -> None:
    q, kv, indices = torch.randn(2, 1, 16), torch.randn(5, 1, 16), torch.zeros(2, 1, dtype=torch.int32)
    for wrong, message in (
        ({"kv": torch.randn(5, 2, 16)}, r"kv is \[5, 2, 16\] torch.float32, expected \[S, 1, 16\] torch.float32"),
        ({"kv": kv.half()}, r"kv is \[5, 1, 16\] torch.float16, expected \[5, 1, 16\] torch.float32"),
        ({"indices": indices.long()}, r"indices is \[2, 1\] torch.int64, expected \[2, 1\] torch.int32"),
        ({"scale": 0.0}, "expected a positive number"),
        ({"value_dim": 17}, "value_dim is 17, expected 0 to 16"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_attention(**({"q": q, "kv": kv, "indices": indices, "scale": 1.0} | wrong))
    bits = torch.full((2, 1), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="bits has bits set past the last of 5 keys"):
        masked_attention(q, kv, kv, bits, 1.0)


def test_the_kernels_say_what_they_do_not_hold() -> None:
    q, kv = tensors((1, 129, 16), (5, 1, 16), dtype=torch.float32)
    indices = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="up to 128 heads, got 129"):
        sparse_attention(q, kv, indices, 1.0, backend="triton")
    reason = launch.hopper_reason(128, 576, 512, torch.bfloat16, torch.device("cpu"))
    assert reason is not None
    assert "Hopper" in reason


def test_short_sequences_are_masked_long_ones_gathered() -> None:
    assert [choose_attention(n, device=DEVICE) for n in (1, 4096, 32768)] == ["masked", "masked", "sparse"]
    assert choose_attention(4096, topk=256, device=DEVICE) == "sparse"
    assert choose_attention(4096) == "masked"


def test_attention_is_masked_only_where_a_fused_kernel_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an NPU the sparse one is fused and a mask of bits is not: no length is short enough for it."""
    monkeypatch.setattr("whorl.device.is_installed", lambda package: package in ("torch_npu", "triton"))
    lengths = (1, 2048, 4096, 32768)
    assert [choose_attention(n, device="cuda:0") for n in lengths] == ["masked", "masked", "masked", "sparse"]
    assert [choose_attention(n, device="npu:0") for n in lengths] == ["sparse"] * 4


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_bits_it_is_torchs_causal_attention(backend: str) -> None:
    dtype = torch.float64 if backend == "torch" else torch.float32
    for queries, keys in ((33, 33), (6, 70)):
        q, k, v = tensors((queries, 4, 24), (keys, 2, 24), (keys, 2, 16), dtype=dtype)
        out, _ = masked_attention(q, k, v, None, 0.2, backend=backend)
        parts = [x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)
        expected = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.2)
        torch.testing.assert_close(out, expected.transpose(0, 1))


# ---- the tests, tested


FAULTS = [
    Fault("missing -1 guard", PLAIN, SPARSE, "(keys >= 0)[None, :], scores", "(keys > -9)[None, :], scores"),
    Fault("576^-0.5 scale", PLAIN, SPARSE, "scores * scale, float", "scores * 0.0601122, float"),
    Fault("infinite maximum", PLAIN, "masked_attention", "constexpr(-1e30)", 'constexpr(float("-inf"))'),
    Fault("lse in powers of two", PLAIN, SPARSE, "(safe)) * LN_2", "(safe))"),
    Fault("old sums not shrunk", PLAIN, SPARSE, "total * shrink + ", "total + "),
    Fault("rest channels left out", PLAIN, SPARSE, "BLOCK_R)), scores, W", "BLOCK_R)), 0 * scores, W"),
    Fault("first head block only", PLAIN, SPARSE, "lse, mask=heads < H", "lse, mask=heads < H - 1"),
    Fault("dV not added into dK's first columns", PLAIN, BACKWARD, "tl.trans(p), dout,", "0 * tl.trans(p), dout,"),
    Fault("delta forgotten", PLAIN, BACKWARD, "(dp - delta[:, None])", "(dp - 0 * delta[:, None])"),
    Fault("dlse ignored", PLAIN, BACKWARD, "delta -= tl.load", "delta -= 0 * tl.load"),
    Fault("dq unscaled", PLAIN, BACKWARD, "delta[:, None]) * scale).to", "delta[:, None])).to"),
    Fault("a token's share lost", PLAIN, BACKWARD, "total + first + second", "total + second"),
    Fault("next key's share", PLAIN, BACKWARD, "(place * K + entries)[:", "(place * K + entries // 2)[:"),
    Fault("bits reversed", MASKED, "masked_attention", ">> (keys % 32)", ">> (31 - keys % 32)"),
    Fault("first word only", MASKED, "masked_attention", "to(tl.int64) * words + first // 32", "to(tl.int64) * words"),
    Fault("last word cut off", MASKED, "masked_attention", "used, places + 1, 0", "used, places, 0"),
    Fault("key head mixed up", MASKED, "masked_attention", "v_ptr += head // (HQ // HK)", "v_ptr += head // HQ", 2),
    Fault("delta forgotten", MASKED, MASKED_BACKWARD, "(dp - tl.expand_dims", "(dp - 0 * tl.expand_dims"),
    Fault("last query head lost", MASKED, MASKED_BACKWARD, "(group + 1) * (HQ // HK)):", "group * (HQ // HK) + 1):"),
    Fault("dk of the rest lost", MASKED, MASKED_BACKWARD, "dk_rest = dot(ds, q_rest", "dk_rest = dot(0 * ds, q_rest"),
]


@pytest.mark.parametrize("fault", one_of_each_quick(FAULTS))
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault.module, fault.old, fault.new, fault.count, tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "plain", sys.modules[PLAIN])
    op = OPS[fault.op]
    assert first_red(op, sorted(op.cases, key=num_rows)) is not None, f"no case of {op.name} notices: {fault.name}"


def test_a_missing_guard_in_the_backward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent keys are zeros there, and their weights are handed to nobody: only an infinite one does harm."""
    plant(PLAIN, "p = tl.where((keys >= 0)", "p = tl.where((keys > -9)", 1, tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "plain", sys.modules[PLAIN])
    with pytest.raises(AssertionError):
        check_low_scores()
