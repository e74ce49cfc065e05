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
    found = attend(values)
    monkeypatch.setattr(prompt_triton, "hopper_reason", lambda *_: "to compare")
    assert torch.equal(found, attend(values))


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
