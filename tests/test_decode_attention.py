"""Attention of decoding tokens in Triton: bits that depend neither on the kernel nor on how cuts are combined."""

from typing import Any

import pytest
import torch
from mock_model import record
from torch import Tensor

from whorl import ops
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model
from whorl.models import gemma3, qwen3

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
import triton
import triton.language as tl

from whorl.ops.attention import decode_triton, qk_norm_rope_decode_triton
from whorl.ops.attention.cuts_triton import fold
from whorl.ops.attention.fold_triton import fold_stored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 32


@triton.jit
def _fold_ahead(out_ptr, top_ptr, total_ptr, y_ptr, first, stop, D: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = tl.arange(0, D)
    out, total = fold_stored(out_ptr, top_ptr, total_ptr, 0, first, stop, channels, D, AHEAD)
    tl.store(y_ptr + channels, out)
    tl.store(y_ptr + D + channels, total)


@triton.jit
def _fold_in_order(out_ptr, top_ptr, total_ptr, y_ptr, first, stop, D: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    channels = tl.arange(0, D)[None, :]
    top, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    out = tl.zeros((1, D), tl.float32)
    for i in range(first, stop):
        at = i + tl.zeros((1,), tl.int32)
        cut_out = tl.load(out_ptr + at[:, None] * D + channels)
        top, total, out = fold(top, total, out, tl.load(top_ptr + at), tl.load(total_ptr + at), cut_out)
    tl.store(y_ptr + channels, out)
    tl.store(y_ptr + D + channels, tl.broadcast_to(total[:, None], out.shape))


def folded(kernel: Any, stored: list[Tensor], first: int, stop: int, ahead: int) -> Tensor:
    y = torch.empty(2, CHANNELS, device=DEVICE)
    kernel[(1,)](*stored, y, first, stop, D=CHANNELS, AHEAD=ahead, num_warps=1, enable_fp_fusion=False)
    return y


@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (0, 8), (0, 21), (3, 20), (5, 6), (7, 7)])
def test_cuts_that_are_combined_ahead_have_the_bits_of_one_after_the_other(first: int, stop: int, ahead: int) -> None:
    torch.manual_seed(0)
    stored = [torch.randn(24, CHANNELS), 4 * torch.randn(24), torch.rand(24)]
    for i in (0, 5, 11):  # cuts without a visible key
        stored[0][i], stored[1][i], stored[2][i] = 0, -torch.inf, 0
    stored[1][21:] = 1e4  # cuts past the last, which nothing may read
    stored = [x.to(DEVICE) for x in stored]
    expected = folded(_fold_in_order, stored, first, stop, ahead)
    assert torch.equal(folded(_fold_ahead, stored, first, stop, ahead), expected)
    if stop - first > 2:
        assert not torch.equal(folded(_fold_ahead, stored, first, stop - 1, ahead), expected)


CASES = {
    "alone": {"contexts": (300,)},
    "a key in a cut of its own": {"contexts": (257, 129)},
    "a lane without a token": {"contexts": (140, 0, 300)},
    "a window": {"contexts": (300, 280), "window": 150},
    "pairs": {"contexts": (200,), "style": "pairs"},
}
SIZES = {"heads": 8, "kv_heads": 2, "dim": 64}


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_has_the_bits_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name] | SIZES
    op, ran = ops.qk_norm_rope_decode, []
    real = qk_norm_rope_decode_triton._rotate_and_attend
    monkeypatch.setattr(
        qk_norm_rope_decode_triton, "_rotate_and_attend", lambda *a, **k: (ran.append(1), real(*a, **k))
    )
    results = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        values = op.make(**case, tokens=(len(case["contexts"]),), dtype=torch.bfloat16, device=DEVICE)
        with monkeypatch.context() as patched:
            if not is_fused:
                patched.setattr(qk_norm_rope_decode_triton, "_is_fused", lambda *_, **__: False)
            op(**values, backend="triton")
        results.append([values[n] for n in ("out", "k_cache", "v_cache")])
    assert ran == [1]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert results[0][0].count_nonzero() > 0
    # Cuts at other places have other bits: the comparison can fail.
    with monkeypatch.context() as patched:
        torch.manual_seed(0)
        values = op.make(**case, tokens=(len(case["contexts"]),), dtype=torch.bfloat16, device=DEVICE)
        for module in (qk_norm_rope_decode_triton, decode_triton):
            patched.setattr(module, "cut_of", lambda _: 32)
        op(**values, backend="triton")
    assert not torch.equal(values["out"], results[0][0])


def test_two_new_tokens_of_a_sequence_are_refused() -> None:
    values = ops.qk_norm_rope_decode.make(**SIZES, contexts=(9, 8), tokens=(2,), dtype=torch.float32, device="cpu")
    values["query_starts"] = torch.tensor([0, 2, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="qk_norm_rope_decode: a sequence has 2 new tokens, expected at most one"):
        ops.qk_norm_rope_decode(**values)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_the_engine_gets_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that grow and shrink, windows among them; the operator runs as often as layers decode."""
    kind = {"qwen3": qwen3.Qwen3, "gemma3": gemma3.Gemma3}[name]
    config = kind.tiny(num_hidden_layers=2)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5] * 40]
    outputs = []
    calls: list[int] = []
    reference = ops.qk_norm_rope_decode.unchecked
    monkeypatch.setattr(
        ops.qk_norm_rope_decode, "unchecked", lambda *a, **k: (calls.append(len(a[0])), reference(*a, **k))
    )
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(qwen3, "ONE_KERNEL", devices)
        torch.manual_seed(0)
        llm = LLM(
            model=random_model(config, device="cpu", dtype=torch.float32), device="cpu", num_blocks=32, block_size=4
        )
        recorded = record(llm)
        sequences = [llm.add(p, SamplingParams(temperature=0, max_tokens=4 + 3 * i))[0] for i, p in enumerate(prompts)]
        while llm.has_work:
            llm.step()
        outputs.append([recorded[seq.id] for seq in sequences])
    assert set(calls) == {1, 2, 3}
    for plain, fused in zip(*outputs, strict=True):
        assert plain.keys() == fused.keys()
        assert len(plain) >= 4
        assert all(torch.equal(plain[i], fused[i]) for i in plain)
