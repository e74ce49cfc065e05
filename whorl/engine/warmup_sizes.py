"""Sizes of steps that represent all others in a warm-up.

Triton compiles a kernel for classes of sizes: one, multiples of 16 and other numbers; launch plans change at powers of
two. So for every power of two, that power and a larger odd number represent all sizes up to the next.
"""

import itertools

from . import graph_sizes

_PRODUCT_ROWS = 128  # torch's matrix products are tuned for every multiple of it, see `ops.linear_library`
# Attention of prompts has a kernel for few sequences, one for many, and one for each power of two above.
_FEW_SEQUENCES, _MANY_SEQUENCES = 32, 256


def class_sizes(limit: int, *, odd: bool = True) -> list[int]:
    """Return counts up to `limit` that represent all of them: powers of two and the limit. With `odd` also a count
    between two powers, the largest multiple of 16 and the limit less one."""
    powers = [1 << i for i in range(limit.bit_length())]
    between = [*(p + p // 2 + 1 for p in powers), limit - 1, limit // 16 * 16] if odd else []
    return sorted({size for size in (*powers, *between, limit) if 1 <= size <= limit})


def counts(limit: int, *, is_full: bool) -> list[int]:
    """Return numbers of tokens or samples up to `limit` that represent all: `class_sizes`, in a full warm-up with all
    sizes of products."""
    products = range(_PRODUCT_ROWS, limit + 1, _PRODUCT_ROWS) if is_full else ()
    return sorted({*class_sizes(limit, odd=is_full), *products})


def sequence_classes(limit: int) -> list[int]:
    """Return the smallest number of sequences up to `limit` for each kernel of attention of prompts."""
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i >= _MANY_SEQUENCES]
    return [size for size in (1, _FEW_SEQUENCES + 1, *(p + 1 for p in powers)) if size <= limit]


def contexts(max_model_len: int, block_size: int) -> list[int]:
    """Return lengths of sequences that represent all. A call's block tables are as wide as its longest sequence."""
    widths = class_sizes(-(-max_model_len // block_size))
    return [min(width * block_size, max_model_len) for width in widths]


def split(size: int, longest: int) -> list[tuple[int, int]]:
    """Return prompts of `size` tokens together, as few as their longest length allows; for each, how many tokens are
    cached (none) and how many are new."""
    full, rest = divmod(size, longest)
    return [(0, longest)] * full + [(0, rest)] * (rest > 0)


def recorded_prompts(sizes: list[tuple[int, int]], most_tokens: int, most_seqs: int, longest: int) -> list[list[int]]:
    """Return the lengths of prompts that need each graph that can occur. sizes: tokens and sequences of each graph.

    A call takes the smallest graph with room for its tokens and its sequences, so one is needed by more tokens or by
    more sequences than the graph before it has room for.
    """
    calls, smaller = [], (0, 0)
    for tokens, sequences in sizes:
        count = min(tokens, most_tokens, min(sequences, most_seqs) * longest)
        if count > smaller[0]:
            calls.append([new for _, new in split(count, longest)])
        elif smaller[1] < sequences and smaller[1] < min(most_seqs, most_tokens):
            calls.append([1] * (smaller[1] + 1))
        smaller = tokens, sequences
    return calls


def smallest_beside(most_tokens: int) -> list[int]:
    """Return the smallest number of decoding tokens, up to `most_tokens`, for each size of graphs that prompts share
    with them; 0 is for prompts alone."""
    return [0, *(size + 1 for size, _ in itertools.pairwise(graph_sizes.BESIDE) if size < most_tokens)]
