"""The DSA names of whorl.ascend: equal to our operators, sequence by sequence, in both layouts."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl import ascend, ops
from whorl.ops.indexer import index_scores
from whorl.ops.indexer.kl import gathered

LENGTHS = ([3, 5], [4, 9])  # queries and keys of two sequences
SCALE = 0.2


@pytest.fixture(autouse=True)
def _small_sizes() -> Any:
    with ascend.limits("ignore"):
        yield


def sequences() -> list[dict[str, Tensor]]:
    """What one sequence has, for each of two."""
    samples = []
    for queries, keys in zip(*LENGTHS, strict=True):
        one = {"q": torch.randn(queries, 4, 16), "q_rope": torch.randn(queries, 4, 8), "k": torch.randn(keys, 1, 16)}
        one |= {
            "k_rope": torch.randn(keys, 1, 8),
            "index_q": torch.randn(queries, 2, 8),
            "index_k": torch.randn(keys, 1, 8),
        }
        one["weights"] = torch.randn(queries, 2)
        one["indices"], one["values"] = ops.lightning_indexer(one["index_q"], one["index_k"][:, 0], one["weights"], 4)
        joined = torch.cat((one["q"], one["q_rope"]), -1), torch.cat((one["k"], one["k_rope"]), -1)
        one["out"], one["lse"] = ops.sparse_attention(*joined, one["indices"], SCALE, value_dim=16)
        samples.append(one)
    return samples


def packed(samples: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.cat([one[name] for one in samples])


def cumulative(tensors: bool) -> tuple[Any, Any]:
    sums = [torch.tensor(lengths).cumsum(0) for lengths in LENGTHS]
    return tuple(s.int() if tensors else s.tolist() for s in sums)  # type: ignore[return-value]


def main_arguments(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"query_rope": packed(samples, "q_rope"), "key_rope": packed(samples, "k_rope")}


def statistics(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """As the device gives them: [1, T, N]."""
    lse = packed(samples, "lse")[None]
    return lse - 1, torch.full_like(lse, torch.e)


def test_indexer_in_both_layouts() -> None:
    samples = sequences()
    queries, keys = cumulative(tensors=True)
    lengths = {"actual_seq_lengths_query": queries, "actual_seq_lengths_key": keys}
    arguments = [packed(samples, n) for n in ("index_q", "index_k", "weights")]
    layouts = {"layout_query": "TND", "layout_key": "TND"}
    indices, values = ascend.npu_lightning_indexer(*arguments, **lengths, **layouts, sparse_count=4, return_value=True)
    assert torch.equal(indices, packed(samples, "indices")[:, None])
    torch.testing.assert_close(values, packed(samples, "values")[:, None])
    assert ascend.npu_lightning_indexer(*arguments, **lengths, **layouts, sparse_count=4)[1].numel() == 0

    padded = [
        torch.nn.utils.rnn.pad_sequence([one[n] for one in samples], True) for n in ("index_q", "index_k", "weights")
    ]
    lengths = {n: torch.tensor(c) for n, c in zip(lengths, LENGTHS, strict=True)}
    indices, _ = ascend.npu_lightning_indexer(*padded, **lengths, sparse_count=4)
    for b, one in enumerate(samples):
        assert torch.equal(indices[b, : len(one["q"]), 0], one["indices"])
        assert (indices[b, len(one["q"]) :] == -1).all()


def test_indexer_without_a_mask_sees_everything() -> None:
    q, k, weights = torch.randn(1, 3, 2, 8), torch.randn(1, 6, 1, 8), torch.rand(1, 3, 2)
    indices, _ = ascend.npu_lightning_indexer(q, k, weights, sparse_count=6, sparse_mode=0)
    assert (indices == torch.arange(6)).all()


def test_attention_and_its_gradient() -> None:
    samples = sequences()
    queries, keys = cumulative(tensors=True)
    q, k, shuffled = packed(samples, "q"), packed(samples, "k"), packed(samples, "indices")[:, None]
    out, top, total = ascend.npu_sparse_flash_attention(
        q, k, k, shuffled, SCALE, actual_seq_lengths_query=queries, actual_seq_lengths_kv=keys, layout_query="TND",
        layout_kv="TND", attention_mode=2, return_softmax_lse=True, **main_arguments(samples),
    )  # fmt: skip
    torch.testing.assert_close(out, packed(samples, "out"))
    torch.testing.assert_close((top + total.log())[0], packed(samples, "lse"))
    assert (total >= 1 - 1e-6).all()

    dout = torch.randn_like(out)
    got = ascend.npu_sparse_flash_attention_grad(
        q, k, k, shuffled, dout, out, top, total, SCALE, 1, packed(samples, "q_rope"), packed(samples, "k_rope"),
        queries, keys, "TND", attention_mode=2,
    )  # fmt: skip
    first = 0
    expected: list[list[Tensor]] = []
    for one in samples:
        leaves = [one[n].clone().requires_grad_() for n in ("q", "k", "q_rope", "k_rope")]
        joined = torch.cat((leaves[0], leaves[2]), -1), torch.cat((leaves[1], leaves[3]), -1)
        y, _ = ops.sparse_attention(*joined, one["indices"], SCALE, value_dim=16)
        expected.append(list(torch.autograd.grad(y, leaves, dout[first : first + len(y)])))
        first += len(y)
    dq, dk, dq_rope, dk_rope = (torch.cat(parts) for parts in zip(*expected, strict=True))
    for g, e in zip((got[0], got[1] + got[2], got[3], got[4]), (dq, dk, dq_rope, dk_rope), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


LEAVES = ("q", "k", "q_rope", "k_rope")


@pytest.mark.parametrize("values", ["the keys", "a copy", "none"])
def test_attention_is_differentiable_as_on_the_device(values: str) -> None:
    """The gradient of our operator; where value is a tensor of its own, its share goes there."""
    samples = sequences()
    queries, keys = cumulative(tensors=True)
    leaves = {n: packed(samples, n).requires_grad_() for n in LEAVES}
    value = {"the keys": leaves["k"], "none": None}.get(values, leaves["k"].detach().clone().requires_grad_())
    out, top, total = ascend.npu_sparse_flash_attention(
        leaves["q"], leaves["k"], value, packed(samples, "indices")[:, None], SCALE, attention_mode=2,
        actual_seq_lengths_query=queries, actual_seq_lengths_kv=keys, layout_query="TND", layout_kv="TND",
        return_softmax_lse=True, query_rope=leaves["q_rope"], key_rope=leaves["k_rope"],
    )  # fmt: skip
    assert not top.requires_grad
    assert not total.requires_grad
    dout = torch.randn_like(out)
    inputs = [*leaves.values(), *([value] if values == "a copy" else [])]
    got = list(torch.autograd.grad(out, inputs, dout))
    expected, first = [], 0
    for one in samples:
        own = [one[n].clone().requires_grad_() for n in LEAVES]
        joined = torch.cat((own[0], own[2]), -1), torch.cat((own[1], own[3]), -1)
        y, _ = ops.sparse_attention(*joined, one["indices"], SCALE, value_dim=16)
        expected.append(torch.autograd.grad(y, own, dout[first : first + len(y)]))
        first += len(y)
    if values == "a copy":
        got[1] = got[1] + got.pop()
    for g, e in zip(got, (torch.cat(parts) for parts in zip(*expected, strict=True)), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_training_beyond_what_the_devices_gradient_takes_is_refused() -> None:
    half = {"dtype": torch.bfloat16}
    q, k = torch.randn(1, 3, 2, 512, **half).requires_grad_(), torch.randn(1, 6, 1, 512, **half)
    more: dict[str, Any] = {"attention_mode": 2, "return_softmax_lse": True}
    more |= {"query_rope": torch.randn(1, 3, 2, 64, **half), "key_rope": torch.randn(1, 6, 1, 64, **half)}
    indices = torch.arange(2, dtype=torch.int32).expand(1, 3, 1, 2)
    with ascend.limits("enforce"):
        with pytest.raises(ValueError, match="topk must be a multiple of 1024, got 2"):
            ascend.npu_sparse_flash_attention(q, k, k, indices, SCALE, **more)
        with torch.no_grad():
            ascend.npu_sparse_flash_attention(q, k, k, indices, SCALE, **more)


def test_indexer_values_are_differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the chosen scores, by autograd over all scores; in both layouts, some queries at a time."""
    samples = sequences()
    queries, keys = cumulative(tensors=True)
    monkeypatch.setattr(sys.modules["whorl.ascend.sparse_autograd"].chunks, "__defaults__", (2 * 4 * (2 + 8),))
    leaves = [packed(samples, n).requires_grad_() for n in ("index_q", "index_k", "weights")]
    lengths = {"actual_seq_lengths_query": queries, "actual_seq_lengths_key": keys}
    indices, values = ascend.npu_lightning_indexer(
        *leaves, **lengths, layout_query="TND", layout_key="TND", sparse_count=4, return_value=True
    )
    assert not indices.requires_grad
    dvalues = torch.randn_like(values)
    got = torch.autograd.grad(values, leaves, dvalues)
    expected, first = [], 0
    for one in samples:
        own = [one[n].clone().requires_grad_() for n in ("index_q", "index_k", "weights")]
        scores = torch.einsum("thd,sd->ths", own[0], own[1][:, 0]).relu().mul(own[2].unsqueeze(-1)).sum(1)
        chosen = scores.gather(1, one["indices"].clamp_min(0).long())
        each = dvalues[first : first + len(chosen), 0].masked_fill(one["indices"] < 0, 0)
        expected.append(torch.autograd.grad(chosen, own, each))
        first += len(chosen)
    for g, e in zip(got, (torch.cat(parts) for parts in zip(*expected, strict=True)), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)
    assert ascend.npu_lightning_indexer(*(x.detach()[None] for x in leaves), sparse_count=4)[1].numel() == 0


def test_gradient_of_many_queries_takes_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4096 queries and 2048 keys each the gathered keys alone would be 19 GB."""
    q, k, indices = torch.randn(1, 7, 2, 16), torch.randn(1, 9, 1, 16), torch.arange(4).int().expand(1, 7, 1, 4)
    more = {"attention_mode": 2, "sparse_mode": 0}
    out, top, total = ascend.npu_sparse_flash_attention(q, k, k, indices, SCALE, return_softmax_lse=True, **more)
    arguments = (q, k, k, indices, torch.randn_like(out), out, top, total, SCALE, 1)
    whole = ascend.npu_sparse_flash_attention_grad(*arguments, **more)
    largest = []
    module = sys.modules["whorl.ascend.sparse_autograd"]
    monkeypatch.setattr(module, "gathered", lambda k, indices: (largest.append(len(indices)), gathered(k, indices))[1])
    monkeypatch.setattr(module.chunks, "__defaults__", (2 * 4 * (2 + 16),))
    for got, expected in zip(ascend.npu_sparse_flash_attention_grad(*arguments, **more), whole, strict=True):
        torch.testing.assert_close(got, expected)
    assert largest == [2, 2, 2, 1]


def gradients_of(samples: list[dict[str, Tensor]], dense: bool) -> tuple[list[Tensor], Tensor]:
    """Of our own loss, sequence by sequence."""
    parts, total = [], torch.zeros(())
    for one in samples:
        leaves = [one["index_q"].clone(), one["index_k"][:, 0].clone(), one["weights"].clone()]
        leaves = [x.requires_grad_() for x in leaves]
        q, k = torch.cat((one["q"], one["q_rope"]), -1), torch.cat((one["k"], one["k_rope"]), -1)
        selection = (None, q, k.expand(-1, 4, -1), one["dense_lse"]) if dense else (one["indices"], q, k, one["lse"])
        loss = ops.indexer_kl_loss(*leaves, *selection, scale=SCALE, reduction="sum")
        parts.append(list(torch.autograd.grad(loss, leaves)))
        total = total + loss.detach()
    return [torch.cat(x) for x in zip(*parts, strict=True)], total


def judge_loss(got: tuple[Tensor, ...], samples: list[dict[str, Tensor]], dense: bool) -> None:
    expected, loss = gradients_of(samples, dense=dense)
    torch.testing.assert_close(got[3], loss[None])
    for g, e in zip((got[0], got[1][:, 0], got[2]), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


def test_sparse_loss() -> None:
    samples = sequences()
    queries, keys = cumulative(tensors=False)
    got = ascend.npu_sparse_lightning_indexer_grad_kl_loss(
        *(packed(samples, n) for n in ("q", "k", "index_q", "index_k", "weights")), packed(samples, "indices")[:, None],
        *statistics(samples), SCALE, **main_arguments(samples), actual_seq_qlen=queries, actual_seq_klen=keys,
        layout="TND",
    )  # fmt: skip
    judge_loss(got, samples, dense=False)


def test_dense_loss_and_its_softmax() -> None:
    samples = sequences()
    for one in samples:
        q, k = torch.cat((one["q"], one["q_rope"]), -1), torch.cat((one["k"], one["k_rope"]), -1)
        logits = torch.einsum("thd,sd->ths", q, k[:, 0]) * SCALE
        seen = torch.arange(len(k)) <= torch.arange(len(k) - len(q), len(k))[:, None]
        one["dense_lse"] = logits.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
        scores = index_scores(one["index_q"], one["index_k"][:, 0], one["weights"])
        one["score_lse"] = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        one["heads"], one["heads_rope"] = one["k"].expand(-1, 4, -1), one["k_rope"].expand(-1, 4, -1)
    queries, keys = cumulative(tensors=False)
    lengths = {"actual_seq_qlen": queries, "actual_seq_klen": keys, "layout": "TND"}
    index = [packed(samples, n) for n in ("index_q", "index_k", "weights")]
    top, total = ascend.npu_dense_lightning_indexer_softmax_lse(*index, **lengths)
    torch.testing.assert_close((top + total.log())[0], packed(samples, "score_lse"))
    lse = packed(samples, "dense_lse").T[..., None]  # a key head for each head: [N, T, 1]
    got = ascend.npu_dense_lightning_indexer_grad_kl_loss(
        packed(samples, "q"), packed(samples, "heads"), *index, lse, torch.ones_like(lse), top, total, SCALE, **lengths,
        query_rope=packed(samples, "q_rope"), key_rope=packed(samples, "heads_rope"),
    )  # fmt: skip
    judge_loss(got, samples, dense=True)


def test_what_is_not_there_is_refused() -> None:
    q, k, weights = torch.randn(1, 3, 2, 8), torch.randn(1, 6, 1, 8), torch.rand(1, 3, 2)
    with pytest.raises(ValueError, match="block_table is implemented on an NPU only"):
        ascend.npu_lightning_indexer(q, k, weights, block_table=torch.zeros(1, 1))
    with pytest.raises(ValueError, match="layouts are 'BSND' and 'PA_BSND'"):
        ascend.npu_lightning_indexer(q, k, weights, layout_key="PA_BSND")
    with pytest.raises(ValueError, match="TND needs the lengths"):
        ascend.npu_lightning_indexer(q[0], k[0], weights[0], layout_query="TND", layout_key="TND")
    with pytest.raises(ValueError, match="next_tokens=3 is implemented on an NPU only"):
        ascend.npu_lightning_indexer(q, k, weights, next_tokens=3)
    indices = torch.zeros(1, 3, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"sparse_mode is 4, expected 0 \(no mask\) or 3"):
        ascend.npu_sparse_flash_attention(q, k, k, indices, SCALE, sparse_mode=4)
    with pytest.raises(ValueError, match="sparse_mode is 1"):
        ascend.npu_dense_lightning_indexer_softmax_lse(q, k, weights, sparse_mode=1)
    with pytest.raises(RuntimeError, match="a gradient needs return_softmax_lse=True"):
        ascend.npu_sparse_flash_attention(q.clone().requires_grad_(), k, k, indices, SCALE)
    with pytest.raises(ValueError, match="value differs from key"):
        ascend.npu_sparse_flash_attention(torch.randn(1, 3, 2, 8), k, k + 1, indices, SCALE)


def test_none_is_causal_and_tokens_mean_nothing_there() -> None:
    """Ported code passes what the vendor's own examples pass: pre_tokens of other modes, and None for the default."""
    q, k, weights = torch.randn(1, 3, 2, 8), torch.randn(1, 6, 1, 8), torch.rand(1, 3, 2)
    expected = ascend.npu_dense_lightning_indexer_softmax_lse(q, k, weights)
    options = {"sparse_mode": None, "layout": None, "pre_tokens": 65536, "next_tokens": 65536}
    for got, right in zip(
        ascend.npu_dense_lightning_indexer_softmax_lse(q, k, weights, **options), expected, strict=True
    ):
        assert torch.equal(got, right)
    everything = ascend.npu_dense_lightning_indexer_softmax_lse(q, k, weights, sparse_mode=0)
    assert not torch.equal(everything[1], expected[1])


def test_documented_limits() -> None:
    half = {"dtype": torch.bfloat16}
    q, k, weights = torch.randn(1, 3, 2, 64, **half), torch.randn(1, 6, 1, 64, **half), torch.rand(1, 3, 2)
    with ascend.limits("enforce"):
        with pytest.raises(ValueError, match="64 heads of 128 and key one head"):
            ascend.npu_lightning_indexer(q, k, weights)
        with pytest.raises(ValueError, match="sparse_count must be 1 to 2048"):
            ascend.npu_lightning_indexer(q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2), weights, sparse_count=2500)
        with pytest.raises(ValueError, match="heads of 512 and a rotary part of 64"):
            ascend.npu_sparse_flash_attention(q, k, k, torch.zeros(1, 3, 1, 2, dtype=torch.int32), SCALE)
