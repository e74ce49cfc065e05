"""Attention of a vision tower: a segment's bits are its own, whatever is packed beside it and whichever kernel runs."""

import itertools
from typing import Any

import pytest
import torch
from test_inference_ops import backends
from torch import Tensor

from whorl.ops import OPS, packed_attention
from whorl.ops._hopper import gluon_reason

Values = dict[str, Any]


def made(lengths: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32, **case: Any) -> Values:
    shape = {"heads": 2, "dim": 72}
    return OPS["packed_attention"].make(**shape | case, lengths=lengths, dtype=dtype, device=device)


def alone(values: Values, backend: str) -> list[Tensor]:
    """Each segment in a call of its own."""
    outputs = []
    for start, end in itertools.pairwise(values["starts"].tolist()):
        part = {n: values[n][start:end].clone() for n in ("q", "k", "v")}
        part["starts"] = values["starts"].new_tensor([0, end - start])
        outputs.append(packed_attention(**values | part, backend=backend))
    return outputs


def check_segments(values: Values, backend: str) -> None:
    expected = alone(values, backend)
    assert torch.equal(packed_attention(**values, backend=backend), torch.cat(expected))
    bounds = values["starts"].tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        poisoned = {n: torch.full_like(values[n], torch.nan) for n in ("q", "k", "v")}
        for name, x in poisoned.items():
            x[start:end] = values[name][start:end]
        actual = packed_attention(**values | poisoned, backend=backend)
        assert torch.equal(actual[start:end], expected[i]), f"segment {i} between others that are not numbers"


# 33 and 40 keys: more than a cut of fp32, more than a tile of queries, and no multiple of either.
@pytest.mark.parametrize("backend", backends("packed_attention"))
def test_a_segments_bits_are_its_own(backend: str, device: str) -> None:
    values = made((33, 1, 40), device, heads=1)
    check_segments(values, backend)
    actual = packed_attention(**values, backend=backend)
    for start, end in itertools.pairwise(values["starts"].tolist()):
        heads = [values[n][start:end].transpose(0, 1)[None].double() for n in ("q", "k", "v")]
        gold = torch.nn.functional.scaled_dot_product_attention(*heads, scale=values["scale"])[0].transpose(0, 1)
        assert (actual[start:end] - gold).abs().max() < 1e-5


@pytest.mark.parametrize("backend", backends("packed_attention"))
def test_rows_of_no_segment_are_zero_whatever_they_hold(backend: str, device: str) -> None:
    values = made((5, 20), device, idle=4)
    for name in ("q", "k", "v"):
        values[name][25:] = torch.nan
    actual = packed_attention(**values, backend=backend)
    assert actual.isfinite().all()
    assert not actual[25:].any()


@pytest.mark.parametrize("backend", backends("packed_attention"))
def test_heads_that_lie_in_one_tensor_are_read_where_they_lie(backend: str, device: str) -> None:
    """q, k and v as views of what one product gives, and of rows whose stride is no multiple of 16 bytes."""
    values = made((20, 17), device)
    expected = packed_attention(**values, backend=backend)
    for pad in (0, 1):
        wide = torch.cat(
            [torch.stack([values[n] for n in ("q", "k", "v")], 1), torch.zeros(37, pad, 2, 72, device=device)], 1
        )
        wide = torch.cat([wide, torch.zeros(*wide.shape[:3], pad, device=device)], -1)
        views = {n: wide[:, i, :, :72] for i, n in enumerate(("q", "k", "v"))}
        assert torch.equal(packed_attention(**values | views, backend=backend), expected)


# ---- on a GPU

TOWER = {"heads": 16}
SEGMENTS = {"picture": (4096,), "frames": (1200,) * 4, "ragged": (1, 127, 128, 129, 0, 700, 64)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize("name", SEGMENTS)
def test_the_kernel_for_hopper_gives_the_bits_of_the_plain_one(
    name: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whorl.ops.attention import bidirectional_triton

    values = made(SEGMENTS[name], "cuda", dtype, dim=dim, **TOWER)
    if (reason := gluon_reason(values["q"].device)) is not None:
        pytest.skip(reason)  # another chip: there is nothing to compare with
    assert bidirectional_triton.hopper_reason(*(values[n] for n in ("q", "k", "v"))) is None
    actual = packed_attention(**values, backend="triton")
    monkeypatch.setattr(bidirectional_triton, "hopper_reason", lambda *_: "to compare")
    assert torch.equal(actual, packed_attention(**values, backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72])
def test_a_segments_bits_are_its_own_on_a_gpu(dim: int) -> None:
    values = made((300, 1, 1200, 129), "cuda", torch.bfloat16, dim=dim, **TOWER)
    check_segments(values, "triton")
    wide = {n: values[n].double() for n in ("q", "k", "v")}
    gold = packed_attention(**values | wide, backend="torch")
    ours, theirs = (packed_attention(**values, backend=each) for each in ("triton", "torch"))
    assert (ours - gold).norm() <= 2 * (theirs - gold).norm()
