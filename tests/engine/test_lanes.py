"""The kernel with which a recorded step begins reads and writes what the plain operations do."""

import pytest
import torch

from whorl.engine.kernels_triton import read
from whorl.engine.lanes import Lanes

BLOCKS, LANES = 9, 5


@pytest.mark.parametrize("width", [1, 4, BLOCKS])
def test_it_gives_what_plain_operations_give(width: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of 1, 3 and 2 rows, as with drafts, two rows of padding, and five entries of it."""
    monkeypatch.setattr("whorl.engine.kernels_triton.MOST", 4)  # a table is copied in several parts
    lanes, plain = Lanes(LANES, BLOCKS, device), Lanes(LANES, BLOCKS, device)
    plain._is_fused = False
    lanes.tokens.copy_(torch.arange(100, 106))
    lanes.tables.copy_(torch.arange(6 * BLOCKS).view(6, BLOCKS))
    plain.tokens.copy_(lanes.tokens), plain.tables.copy_(lanes.tables)
    of_row = torch.tensor([2, 0, 0, 0, 4, 4, LANES, LANES])
    places = torch.tensor([3, 0, 0, 1, 8, 8, 0, 0])
    arrays = {
        "tokens": torch.tensor([-1, -1, 7, 8, 9, 10, 0, 0]),
        "lanes": of_row,
        "table_at": of_row * BLOCKS + places,
        "blocks": torch.tensor([901, 902, 902, 903, 904, 904, 0, 0], dtype=torch.int32),
        "entry_lanes": torch.tensor([2, 0, 4, *[LANES] * 5]),
        "query_starts": torch.tensor([0, 1, 4, *[6] * 6], dtype=torch.int32),
    }
    arrays = {name: value.to(device) for name, value in arrays.items()}
    token_ids, tables = read(lanes.tokens, lanes.tables, arrays, width)
    expected_ids, expected = plain.read(arrays, width, is_decode=True)
    assert torch.equal(token_ids, expected_ids)
    assert token_ids.tolist()[:4] == [102, 100, 7, 8]
    assert torch.equal(tables[:3], expected[:3]), "padding is nobody's"
    assert torch.equal(lanes.tables[:LANES], plain.tables[:LANES])
