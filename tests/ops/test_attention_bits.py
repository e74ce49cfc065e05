"""Attention of prompts on a GPU: whichever kernel runs and however a prompt is cut, the bits are the same."""

import pytest
import torch
from torch import Tensor

from whorl.ops import OPS
from whorl.ops._hopper import gluon_reason
from whorl.ops._op import Values

pytestmark = pytest.mark.gpu

CASES: dict[str, Values] = {
    "whole": {"queries": (1000,), "contexts": (1000,)},
    "chunks": {"queries": (700, 333, 1), "contexts": (1700, 4333, 77)},
    "window": {"queries": (900, 65), "contexts": (900, 1500), "window": 200},
    "large blocks": {"queries": (300, 40), "contexts": (400, 900), "block": 128},
    "few heads": {"queries": (300,), "contexts": (5000,), "heads": 5, "kv_heads": 5},
    "small blocks": {"queries": (300, 17), "contexts": (700, 17), "block": 8},
    "other blocks": {"queries": (300,), "contexts": (1001,), "block": 48},
}


def attend(values: Values) -> Tensor:
    return OPS["paged_attention"](**values, backend="triton")


def made(case: Values, dtype: torch.dtype, dim: int = 128) -> Values:
    shape = {"heads": 32, "kv_heads": 4, "dim": dim, "block": 16}
    return OPS["paged_attention"].make(**shape | case, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_for_hopper_gives_the_bits_of_the_plain_one(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whorl.ops.attention import prompt_triton

    values = made(CASES[name], dtype)
    strides = (*values["q"].stride()[:2], *values["k_cache"].stride()[:3], *values["v_cache"].stride()[:3], 0)
    tensors = [values[n] for n in ("q", "k_cache", "v_cache")]
    if (reason := gluon_reason(values["q"].device)) is not None:
        pytest.skip(reason)  # another chip: there is nothing to compare with
    assert prompt_triton.hopper_reason(tensors, strides) is None
    actual = attend(values)
    monkeypatch.setattr(prompt_triton, "hopper_reason", lambda *_: "to compare")
    assert torch.equal(actual, attend(values))


@pytest.mark.parametrize("has_table", [True, False])
def test_where_heads_and_blocks_lie_changes_no_bit(*, has_table: bool) -> None:
    """Keys and values of a block side by side, and heads that lie far apart."""
    if has_table:
        values = made({"queries": (300, 77), "contexts": (900, 77)}, torch.bfloat16)
        names, call = ("k_cache", "v_cache"), attend
    else:
        values = packed((300, 77), torch.bfloat16)
        names, call = ("q", "k", "v"), lambda values: OPS["causal_attention"](**values, backend="triton")[0]
    expected = call(values)
    heads_first = {name: values[name].transpose(-3, -2).contiguous().transpose(-3, -2) for name in names}
    assert torch.equal(call(values | heads_first), expected)
    pairs = torch.stack([values[name] for name in names[-2:]], 1)
    beside = {name: pairs[:, i] for i, name in enumerate(names[-2:])}
    assert torch.equal(call(values | beside), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_lies_past_the_end_changes_no_bit(value: float) -> None:
    """The rest of a sequence's last block, blocks of no sequence, and in training the next sequence."""
    values = made({"queries": (300, 77), "contexts": (901, 77)}, torch.bfloat16)
    used = torch.zeros(values["k_cache"].shape[:2], dtype=torch.bool, device="cuda")
    for table, length in zip(values["block_tables"].long(), values["context_lens"].tolist(), strict=True):
        at = torch.arange(length, device="cuda")
        used[table[at // 16], at % 16] = True
    mask = ~used[..., None, None]
    spoilt = {name: values[name].masked_fill(mask, value) for name in ("k_cache", "v_cache")}
    assert torch.equal(attend(values | spoilt), attend(values))
    values = packed((301, 100), torch.bfloat16)
    spoilt = {name: values[name].clone() for name in ("k", "v")}
    for x in spoilt.values():
        x[301:] = value
    out = [OPS["causal_attention"](**values | other, backend="triton")[0][:301] for other in ({}, spoilt)]
    assert torch.equal(*out)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 150])
def test_where_a_chunk_begins_changes_no_bit(dim: int, window: int) -> None:
    """Borders at no multiple of a tile or of a cut; a masked and an unmasked loop must compute alike."""
    values = made({"queries": (900,), "contexts": (1400,), "window": window}, torch.bfloat16, dim)
    whole = attend(values)
    for count in (1, 50, 333, 771):
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        chunk = attend(values | {"q": values["q"][-count:].contiguous(), "query_starts": starts})
        assert torch.equal(chunk, whole[-count:]), f"the last {count} of 900"


# ---- in training


def packed(lengths: tuple[int, ...], dtype: torch.dtype, **case: int) -> Values:
    shape = {"heads": 32, "kv_heads": 4, "dim": 128}
    return OPS["causal_attention"].make(**shape | case, lengths=lengths, dtype=dtype, device="cuda")


def paged_as(values: Values, lengths: tuple[int, ...], block: int) -> Values:
    """The same tokens as prompts, their keys in pages that lie in disorder."""
    counts = [-(-n // block) for n in lengths]
    free = torch.randperm(sum(counts) + 3, device="cuda").int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    shape = (len(free), block, *values["k"].shape[1:])
    caches = [torch.full(shape, 3e4, device="cuda", dtype=values["k"].dtype) for _ in range(2)]
    begin = 0
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[b, :count], free = free[:count], free[count:]
        at = torch.arange(length, device="cuda")
        for cache, name in zip(caches, ("k", "v"), strict=True):
            cache[tables[b, at // block].long(), at % block] = values[name][begin : begin + length]
        begin += length
    return {
        "q": values["q"],
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables,
        "query_starts": values["starts"],
        "context_lens": values["starts"].diff().int(),
        "scale": values["scale"],
        "window": values["window"],
    }


TRAINED: dict[str, Values] = {
    name: {"lengths": case["queries"], **{n: case[n] for n in ("window", "heads", "kv_heads") if n in case}}
    for name, case in CASES.items()
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TRAINED)
def test_training_has_the_bits_of_the_engine(name: str, dtype: torch.dtype) -> None:
    """Prefilled in one call, and the last tokens of every sequence decoded by their own kernel."""
    case = TRAINED[name]
    values = packed(dtype=dtype, **case)
    out, _ = OPS["causal_attention"](**values, backend="triton")
    pages = paged_as(values, case["lengths"], CASES[name].get("block", 16))
    assert torch.equal(out, attend(pages))
    last = (values["starts"][1:] - 1).long()
    each = torch.arange(len(last) + 1, dtype=torch.int32, device="cuda")
    assert torch.equal(out[last], attend(pages | {"q": values["q"][last], "query_starts": each}))


@pytest.mark.parametrize("name", TRAINED)
def test_the_kernels_of_training_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.ops.attention import prompt_triton

    values = packed(dtype=torch.bfloat16, **TRAINED[name])
    out, lse = OPS["causal_attention"](**values, backend="triton")
    monkeypatch.setattr(prompt_triton, "hopper_reason", lambda *_: "to compare")
    plain, logs = OPS["causal_attention"](**values, backend="triton")
    assert torch.equal(out, plain)
    torch.testing.assert_close(lse, logs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["whole", "chunks", "window"])
def test_lse_is_torchs(name: str) -> None:
    values = packed(dtype=torch.bfloat16, **TRAINED[name])
    _, lse = OPS["causal_attention"](**values, backend="triton")
    begin = 0
    for length in TRAINED[name]["lengths"]:
        q, k = (values[n][begin : begin + length].double().transpose(0, 1) for n in ("q", "k"))
        at = torch.arange(length, device="cuda")
        visible = at <= at[:, None]
        if values["window"]:
            visible &= at > at[:, None] - values["window"]
        scores = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(1, 2) * values["scale"]
        expected = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), -1).T
        torch.testing.assert_close(lse[begin : begin + length].double(), expected, rtol=1e-3, atol=1e-3)
        begin += length


def test_tokens_past_two_to_the_31_elements() -> None:
    """The last sequence of many, alone and behind the others."""
    lengths = (4096,) * 128 + (200,)
    values = packed(lengths, torch.bfloat16)
    assert values["q"].numel() > 2**31
    out, lse = OPS["causal_attention"](**values, backend="triton")
    alone = {n: values[n][-200:] for n in ("q", "k", "v")} | {"starts": values["starts"].new_tensor([0, 200])}
    expected = OPS["causal_attention"](**values | alone, backend="triton")
    assert torch.equal(out[-200:], expected[0])
    assert torch.equal(lse[-200:], expected[1])


def test_segments_past_two_to_the_31_elements() -> None:
    """As above, of attention without a mask."""
    q, k, v = (torch.randn(2**19 + 200, 64, 72, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    assert q.numel() > 2**31
    starts = torch.tensor([*range(0, 2**19 + 1, 4096), 2**19 + 200], dtype=torch.int32, device="cuda")
    out = OPS["packed_attention"](q, k, v, starts, scale=0.1, backend="triton")
    alone = [x[-200:] for x in (q, k, v)]
    expected = OPS["packed_attention"](*alone, starts.new_tensor([0, 200]), scale=0.1, backend="triton")
    assert torch.equal(out[-200:], expected)
