"""What a gated delta layer stores for a running sequence, by name: the tensors that operators on lanes take."""

import torch

CHUNK = 64  # tokens of a chunk; chunks begin at positions that are multiples of this
BLOCK = 16  # rows of a chunk that are computed together
RECENT = 2 * BLOCK  # rows of a chunk of which everything is stored
MOST_ROWS = 16  # new tokens of a decoding sequence in a call, drafts included: they lie in two blocks at most

TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def delta_tensors(
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    width: int,
    dtype: torch.dtype,
) -> tuple[TensorSpecs, TensorSpecs]:
    """Return the shapes and dtypes of what a layer stores for a sequence, without the dim of lanes.

    The first are what a snapshot holds, the state at the last multiple of CHUNK:

        state   [HV, D, DV] fp32  the recurrence's state
        tail    [width - 1, N]    the last inputs of the convolution before that position

    The second are what it stores of the tokens since then, the open chunk:

        rounded [HV, D, DV]       the state, rounded to dtype
        keys    [HK, CHUNK, D]    the normalised key of each row
        deltas  [HV, CHUNK, DV]   what each row adds to the state, next to its key
        decays  [HV, CHUNK] fp32  the sum of the rows' g up to each row
        errors  [HV, RECENT, DV]  of rows of the last two blocks, row i at i % RECENT
        inverses [HV, RECENT, BLOCK] fp32  of the same rows
        inputs  [ring, N]         the convolution's inputs, that of row i at i % ring

    N: channels of the convolution, of all q, k and v heads. width: the convolution's. There is room to reject drafts of
    up to MOST_ROWS tokens in a call. `arithmetic.py` says what rows are. Sizes are those of this rank.
    """
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    state = (num_value_heads, key_dim, value_dim)
    kept: TensorSpecs = {"state": (state, torch.float32), "tail": ((width - 1, channels), dtype)}
    rows: TensorSpecs = {
        "rounded": (state, dtype),
        "keys": ((num_key_heads, CHUNK, key_dim), dtype),
        "deltas": ((num_value_heads, CHUNK, value_dim), dtype),
        "decays": ((num_value_heads, CHUNK), torch.float32),
        "errors": ((num_value_heads, RECENT, value_dim), dtype),
        "inverses": ((num_value_heads, RECENT, BLOCK), torch.float32),
        "inputs": ((MOST_ROWS + width - 1, channels), dtype),
    }
    return kept, rows
