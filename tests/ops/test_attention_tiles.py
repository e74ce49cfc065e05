"""Attention on the CPU: sequences side by side have the bits that each has alone, or are not put side by side."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from whorl.ops import OPS, paged_attention
from whorl.ops.attention import paged, tiles

LENGTHS = (3, 17, 64, 65, 250, 256, 257, 300, 301, 520, 700, 40)


def values_of(lengths: tuple[int, ...], queries: int, dtype: torch.dtype, **changes: int) -> dict[str, Tensor]:
    shape = {"heads": 6, "kv_heads": 2, "dim": 32, "block": 16} | changes
    sizes = {"queries": (queries,) * len(lengths), "contexts": lengths}
    return OPS["paged_attention"].make(**sizes, **shape, dtype=dtype, device="cpu")


def alone(values: dict[str, Tensor], b: int) -> Tensor:
    start, end = values["query_starts"][b : b + 2].tolist()
    own = {
        "q": values["q"][start:end],
        "block_tables": values["block_tables"][b : b + 1],
        "query_starts": torch.tensor([0, end - start], dtype=torch.int32),
        "context_lens": values["context_lens"][b : b + 1],
    }
    return paged_attention(**values | own)


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with paged_attention.using("torch"):
        yield


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call put side by side."""
    counts: list[int] = []
    real = paged.attend_together

    def attend_together(q: Tensor, *arguments: object) -> Tensor:
        counts.append(len(q))
        return real(q, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(paged, "attend_together", attend_together)
    return counts


def as_defined(values: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Every sequence by itself in tiles of ROWS rows."""
    with monkeypatch.context() as patch:
        patch.setattr(paged, "rows_together", lambda *_: ())
        patch.setattr(tiles, "_sizes", lambda *_: (tiles.ROWS,))
        return paged_attention(**values)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoded_side_by_side(
    queries: int, window: int, heads: int, dtype: torch.dtype, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = tuple(length + queries for length in LENGTHS * 3)
    values = values_of(lengths, queries, dtype, window=window, heads=heads)
    together = paged_attention(**values)
    expected = as_defined(values, monkeypatch)
    assert torch.equal(together, expected)
    for b in random.Random(0).sample(range(len(lengths)), 6):
        assert torch.equal(together[b * queries : (b + 1) * queries], alone(values, b))
    sizes = tiles.rows_together((2, 32), torch.float32, "cpu", torch.get_num_threads())
    assert (max(counted, default=0) > 1) is (max(sizes, default=0) >= queries * heads // 2)


def test_prompts_between_decoded_sequences_stay_where_they_are() -> None:
    sizes = {"queries": (1, 40, 1, 0, 1, 3), "contexts": (9, 90, 20, 7, 30, 33)}
    shape = {"heads": 4, "kv_heads": 2, "dim": 16, "block": 8}
    values = OPS["paged_attention"].make(**sizes, **shape, dtype=torch.float32, device="cpu")
    whole = paged_attention(**values)
    starts = values["query_starts"].tolist()
    for b in (0, 1, 2, 4, 5):
        assert torch.equal(whole[starts[b] : starts[b + 1]], alone(values, b))


def test_what_lies_past_a_sequence_is_not_read() -> None:
    values = values_of((5, 21, 40), 1, torch.float32)
    expected = paged_attention(**values)
    tables, lengths = values["block_tables"], values["context_lens"].tolist()
    used = {(int(tables[b, i // 16]), i % 16) for b, length in enumerate(lengths) for i in range(length)}
    for name in ("k_cache", "v_cache"):
        cache = values[name]
        for block in range(cache.shape[0]):
            for slot in range(16):
                if (block, slot) not in used:
                    cache[block, slot] = torch.nan
    for b, length in enumerate(lengths):
        tables[b, -(-length // 16) :] = torch.iinfo(torch.int32).max
    assert torch.equal(paged_attention(**values), expected)


def test_sequences_stay_apart_where_their_bits_would_change(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(LENGTHS, 1, torch.float32)
    expected = paged_attention(**values)
    counted.clear()
    monkeypatch.setattr(tiles._STORE, "outcome", lambda *_: False)
    monkeypatch.setattr(paged, "rows_together", tiles.rows_together.__wrapped__)
    assert torch.equal(paged_attention(**values), expected)
    assert not counted


@pytest.mark.parametrize("fault", [None, "rows", "sequences", "keys"])
def test_the_trial_notices_other_bits(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of attention: numbers of each row by itself, which a fault changes in the last bit."""

    def tile(rows: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        is_other = {
            "rows": rows.shape[-2] != tiles.ROWS,
            "sequences": rows.dim() == 4 and len(rows) == 8,
            "keys": k.shape[-2] == 3 * tiles.STEP,
        }.get(str(fault), False)
        out = rows.nextafter(torch.tensor(torch.inf)) if is_other else rows
        return out, out, out

    monkeypatch.setattr(tiles, "_tile", tile)
    assert tiles._is_equal_together((2, 32), 4, torch.float32) is (fault is None)
