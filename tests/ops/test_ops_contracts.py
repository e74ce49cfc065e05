"""What every operator holds to whatever it computes: meta tensors, refusals of lengths, ids and gradients."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl import ops
from whorl.ops import OPS, Op
from whorl.ops.attention import paged_torch_npu

Values = dict[str, Any]
BACKWARD = [op for op in OPS.values() if op.name.endswith("_backward")]


def make(op: Op, case: Values, dtype: torch.dtype = torch.float32) -> Values:
    return op.make(**case, dtype=dtype, device="cpu")


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


# ---- meta tensors


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_operator_takes_meta_tensors(op: Op) -> None:
    """The shapes, strides and dtypes of the reference, for every case, without a value being read."""
    for case in op.cases:
        values = make(op, case, torch.bfloat16)
        result = op(**{n: v.to("meta") if isinstance(v, Tensor) else v for n, v in values.items()})
        if op.mutates:
            assert result is None
            continue
        for got, expected in zip(listed(result), listed(op.reference(**values)), strict=True):
            assert (got is None) == (expected is None), case
            if got is not None:
                assert got.device.type == "meta"
                assert (got.shape, got.dtype) == (expected.shape, expected.dtype), case
                assert got.is_contiguous() == expected.is_contiguous(), case


# ---- attention over pages


def attention(**changes: Any) -> Tensor:
    """Sequences of 3 and 1 queries over 9 and 20 keys, in blocks of 8."""
    case = {"queries": (3, 1), "contexts": (9, 20), "heads": 2, "kv_heads": 1, "dim": 16}
    values = make(OPS["paged_attention"], case)
    return ops.paged_attention(**values | {n: c(values[n]) if callable(c) else c for n, c in changes.items()})


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": lambda t: t[:, :2]}, "sequence 1 has 1 queries and context_lens 20; .* than the 16 that its"),
        ({"context_lens": ints(2, 20)}, "sequence 0 has 3 queries and context_lens 2; expected no more queries"),
        ({"context_lens": ints(0, 20)}, "sequence 0 has 3 queries and context_lens 0"),
        ({"query_starts": ints(1, 3, 4)}, r"query_starts are \[1, 3, 4\], expected 0 first"),
        ({"query_starts": ints(-1, 3, 4)}, "expected 0 first"),
        ({"query_starts": ints(0, 4, 3)}, "none below the one before"),
        ({"query_starts": ints(0, 3, 5)}, "4 queries at most"),
        ({"block_tables": lambda t: t.masked_fill(t == t[1, 2], 99)}, "has blocks .*99.*, expected 0 to"),
        ({"block_tables": lambda t: t.masked_fill(t == t[0, 0], -1)}, "sequence 0 has blocks .*-1.*, expected 0 to"),
        ({"context_lens": ints(9, 20)[:, None]}, r"context_lens is \[2, 1\] torch.int32, expected \[2\] torch.int32"),
    ],
)
def test_lengths_that_cannot_be_are_refused(changes: Values, message: str) -> None:
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        attention(**changes)


def test_on_ascend_lengths_are_seen_too() -> None:
    """The operator there takes them as integers, so they are on the host."""
    values = make(OPS["paged_attention"], {"queries": (3,), "contexts": (9,), "heads": 2, "kv_heads": 1, "dim": 16})
    for wrong in ({"query_starts": ints(1, 3)}, {"context_lens": ints(2)}, {"context_lens": ints(25)}):
        with pytest.raises(ValueError, match="paged_attention: "):
            paged_torch_npu.attention(**values | wrong)


def test_a_sequence_without_queries_may_have_any_length() -> None:
    """As rows that only fill a recorded call up."""
    assert attention(query_starts=ints(0, 4, 4), context_lens=ints(9, 10**6)).shape == (4, 2, 16)


# ---- caches of latents and of the indexer's keys


def codes(width: int) -> Tensor:
    return torch.zeros(3, 4, width, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("latent_write", {"cache": torch.zeros(3, 4, 47)}, r"cache is .*47\] .*, expected \[3, 4, 48\]: 48 channels"),
        ("latent_write", {"cache": torch.zeros(3, 4, 48).half()}, "expected .* torch.float32 or torch.uint8"),
        ("latent_write", {"cache": codes(48)}, r"48\] torch.uint8, expected \[3, 4, 68\]: .* 68 of torch"),
        ("latent_write", {"cache": codes(69)[..., :68]}, r"cache has strides .*69, 1\), expected the bytes of a block"),
        ("latent_write", {"rotary_cache": torch.zeros(3, 4, 16)}, r"cache is \[3, 4, 48\] .*, expected \[3, 4, 32\]"),
        ("latent_write", {"rotary_cache": torch.zeros(3, 4, 14)}, r"rotary_cache is \[3, 4, 14\] .* \[3, 4, 16\]"),
        ("latent_write", {"rotary_cache": torch.zeros(3, 4, 16), "cache": codes(68)}, "expected both parts in one"),
        ("latent_write", {"cos_sin": lambda x: x[:, :15]}, r"cos_sin is \[7, 15\] .*, expected \[7, 2\*pairs\]"),
        ("latent_write", {"cos_sin": lambda x: x[:, :14]}, r"kv is \[7, 48\] .*, expected \[7, 46\]"),
        ("latent_write", {"slots": lambda x: x + 12}, "slots has values from .*, expected 11 at most"),
        ("index_write", {"cos_sin": lambda x: torch.cat((x, x, x), 1)}, "cos_sin has 48 channels, expected at most 32"),
        ("index_write", {"cache": codes(35)}, r"cache is \[3, 4, 35\] torch.uint8, expected \[3, 4, 36\]"),
        ("paged_indexer", {"cache": lambda x: x[..., :15]}, r"cache is .* expected \[.*, 16\]: 16 channels, or 20 of"),
        ("paged_indexer", {"context_lens": ints(2, 9, 20)}, "sequence 0 has 3 queries and context_lens 2"),
        ("paged_indexer", {"topk": 0}, "topk is 0, expected a positive number"),
        ("latent_attention", {"value_dim": 25}, "value_dim is 25, expected 1 to 24"),
        ("latent_attention", {"block_tables": lambda x: x.fill_(99)}, "sequence 0 has blocks .*99.*, expected 0 to"),
        ("latent_attention", {"indices": lambda x: x.flip(1)}, "row 0 of indices does not ascend or has a key after"),
        ("latent_attention", {"indices": lambda x: x[:, :1].fill_(3)}, "indices name key 3 of sequence 0, expected at"),
    ],
)
def test_caches_that_do_not_fit_are_refused(name: str, changes: Values, message: str) -> None:
    values = make(OPS[name], OPS[name].cases[1])
    changed = {n: c(values[n]) if callable(c) else c for n, c in changes.items()}
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        OPS[name](**values | changed)


# ---- slots and ids


@pytest.mark.parametrize("name", ["write_kv", "qk_norm_rope_write"])
@pytest.mark.parametrize("is_sliced", [False, True])
def test_slots_may_be_int32(name: str, is_sliced: bool) -> None:
    op = OPS[name]
    case = next(c for c in op.cases if c["tokens"][0] > 1 and bool(c.get("sliced")) == is_sliced)
    values = make(op, case | {"skipped": 1})
    written = []
    for slots in (values["slots"].long(), values["slots"].int()):
        copies = {n: values[n].clone() for n in op.mutates if values[n] is not None}
        op(**values | copies | {"slots": slots})
        written.append(list(copies.values()))
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))
    assert not torch.equal(written[0][-1], values["v_cache"])


@pytest.mark.parametrize("name", ["write_kv", "qk_norm_rope_write"])
def test_slots_past_the_cache_are_refused(name: str) -> None:
    op = OPS[name]
    values = make(op, op.cases[1])
    size = values["k_cache"].shape[0] * values["k_cache"].shape[1]
    slots = values["slots"].clone()
    slots[-1] = size
    is_stated = OPS[name].spec.statements.get("slots")
    message = f"slots has values .* to {size}, expected {size - 1} at most" if is_stated else f"slot {size} is past"
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        op(**values | {"slots": slots})


@pytest.mark.parametrize("wrong", [-1, 4])
def test_experts_that_do_not_exist_are_refused(wrong: int) -> None:
    values = make(OPS["experts"], {"tokens": (5,), "hidden": 8, "width": 4, "experts": 4, "k": 2})
    values["ids"][2, 1] = wrong
    with pytest.raises(ValueError, match=r"experts: ids has values from -?\d to \d, expected 0 to 3"):
        ops.experts(**values)


def test_a_gradient_of_experts_that_do_not_exist_is_refused() -> None:
    values = make(OPS["route_backward"], OPS["route_backward"].cases[1])
    with pytest.raises(ValueError, match="route_backward: ids has values from -1 to"):
        ops.OPS["route_backward"](**values | {"ids": values["ids"].clone().fill_(-1)})


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_negative_filters_are_refused(name: str) -> None:
    values = make(OPS["sample"], {"tokens": (3,), "vocab": 8})
    with pytest.raises(ValueError, match=f"sample: {name} has values from -1.*, expected 0 or more"):
        ops.sample(**values | {name: values[name].clone().fill_(-1)})


@pytest.mark.parametrize("wrong", [8, -2])
def test_penalised_tokens_outside_the_vocabulary_are_refused(wrong: int) -> None:
    tokens = torch.tensor([[1, wrong], [2, -1]])
    with pytest.raises(ValueError, match=r"penalize: tokens has values from -?\d to \d, expected -1 to 7"):
        ops.penalize(torch.zeros(2, 8), tokens, torch.zeros_like(tokens))
    with pytest.raises(ValueError, match=r"penalize: repetition is \[3\] torch.float32, expected \[2\]"):
        ops.penalize(torch.zeros(2, 8), tokens, torch.zeros_like(tokens), repetition=torch.ones(3))


# ---- gradients


# What may differ: any number of keys and of chosen ones, a longer table, weights and probabilities in a dtype of their
# own, logits of experts or tokens that nobody chose, gradients that share no tensor with anything else.
FREE = {
    ("route_backward", "dweights"): ("float64", "float16"),
    ("route_backward", "logits"): ("float64", "float16", "more in dim 1", "fewer in dim 1"),
    ("permute_backward", "drows"): ("float64", "float16", "more in dim 1", "fewer in dim 1"),
    ("permute_backward", "probs"): ("float64", "float16"),
    ("unpermute_backward", "probs"): ("float64", "float16"),
    ("qk_norm_rope_backward", "cos_sin"): ("more in dim 0", "fewer in dim 0"),
    ("token_logprobs_backward", "logits"): ("float16", "more in dim 1", "fewer in dim 1"),
    ("causal_attention_backward", "starts"): ("fewer in dim 0",),  # then the last tokens are of no sequence
    ("packed_attention_backward", "starts"): ("fewer in dim 0",),
    ("causal_conv_backward", "starts"): ("fewer in dim 0",),
    ("causal_conv_backward", "weight"): ("more in dim 1", "fewer in dim 1"),
    ("gated_delta_backward", "starts"): ("fewer in dim 0",),
    ("sparse_attention_backward", "kv"): ("more in dim 0", "fewer in dim 0"),
    ("sparse_attention_backward", "indices"): ("more in dim 1", "fewer in dim 1"),
}


def changes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    for d in range(x.dim()):
        yield f"fewer in dim {d}", x.narrow(d, 0, x.shape[d] - 1)
        yield f"more in dim {d}", torch.cat((x, x.narrow(d, 0, 1)), d)
    yield "a dim more", x[None]
    yield "a dim fewer", x[0]
    if x.is_floating_point():
        yield from (("float64", x.double()), ("float16", x.half()), ("int32", x.int()))
    else:
        yield "float32", x.float()
    yield "meta", x.to("meta")


def largest_case(op: Op) -> Values:
    """With the most tensors, the smallest of which is not one element: no size is broadcast by luck."""

    def score(case: Values) -> tuple[int, int]:
        tensors = [v for v in make(op, case).values() if isinstance(v, Tensor)]
        return (len(tensors), 0) if min(t.numel() for t in tensors) > 1 else (0, 0)

    return make(op, max(op.cases, key=score))


@pytest.mark.parametrize("op", BACKWARD, ids=lambda op: op.name)
def test_wrong_gradients_are_refused(op: Op) -> None:
    """Every tensor of every backward operator, of another shape, dtype or device."""
    values, wrong = largest_case(op), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op(**values)
        for name, x in values.items():
            if not isinstance(x, Tensor):
                continue
            for what, changed in changes(x):
                try:
                    op(**values | {name: changed})
                except ValueError as error:
                    if not str(error).startswith(op.name):
                        wrong.append(f"{name}, {what}: {error}")
                    continue
                except Exception as error:
                    wrong.append(f"{name} {list(x.shape)}, {what}: {type(error).__name__}: {error}")
                    continue
                if what not in FREE.get((op.name, name), ()):
                    wrong.append(f"{name} {list(x.shape)}, {what}: taken")
    assert not wrong, "\n".join(wrong)


def test_there_are_backward_operators() -> None:
    assert len(BACKWARD) >= 12
