"""Combining many cuts on Hopper has the bits of the kernel that combines few; attention of long contexts uses it."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
HEADS = 32


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cuts of every launch of the Hopper kernel."""
    from whorl.ops.attention import fold_gluon_triton

    cuts: list[int] = []
    run = fold_gluon_triton.run

    def counted(*args: Any) -> None:
        cuts.append(args[5])
        run(*args)

    monkeypatch.setattr(fold_gluon_triton, "run", counted)
    return cuts


def stored(lengths: list[int], dim: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, int]:
    """Results of cuts, some of which have no visible keys; starts and lengths of the sequences, and room for cuts."""
    count, cuts = len(lengths), max(lengths) // 128 + 3
    out = torch.randn(count, HEADS, cuts, dim, device="cuda")
    top, total = 5 * torch.randn(count, HEADS, cuts, device="cuda"), 100 * torch.rand(count, HEADS, cuts, device="cuda")
    for head, empty in ((3, slice(None)), (5, slice(0, cuts // 2)), (7, slice(cuts // 3, None))):
        out[:, head, empty], top[:, head, empty], total[:, head, empty] = 0, float("-inf"), 0
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    return [out, top, total], starts, torch.tensor(lengths, dtype=torch.int32, device="cuda"), cuts


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[32768], [1], [129], [32767], [30001], [33000], [131072], [32768, 5, 9000, 128], [20000] * 6],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}",
)
def test_bits(
    lengths: list[int], dtype: torch.dtype, dim: int, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from whorl.ops.attention import decode_triton, fold_gluon_triton

    torch.manual_seed(0)
    tensors, starts, counts, cuts = stored(lengths, dim)
    for window in (0, 1000):
        ys = []
        for is_hopper in (False, True):
            monkeypatch.setattr(fold_gluon_triton, "fits", lambda y, cuts, fits=is_hopper: fits)
            ys.append(torch.full((len(lengths), HEADS, dim), 7.0, dtype=dtype, device="cuda"))
            decode_triton._fold_cuts(tensors, starts, counts, ys[-1], window, cuts)
        assert torch.equal(*ys), (lengths, window)
    assert runs == [cuts] * 2


@pytest.mark.parametrize(("keys", "count", "is_hopper"), [(12000, 1, True), (4096, 1, False), (32768, 4, False)])
def test_attention_of_long_contexts_uses_it(
    keys: int, count: int, is_hopper: bool, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from whorl import ops
    from whorl.ops.attention import fold_gluon_triton

    torch.manual_seed(1)
    values = ops.OPS["paged_attention"].make(
        queries=(1,) * count, contexts=(keys,) * count, heads=HEADS, kv_heads=4, dim=128, block=16,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    y = ops.paged_attention(**values, backend="triton")
    assert bool(runs) == is_hopper
    monkeypatch.setattr(fold_gluon_triton, "fits", lambda y, cuts: False)
    assert torch.equal(y, ops.paged_attention(**values, backend="triton"))
