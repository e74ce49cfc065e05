"""Cases of an operator, for tests and benchmarks: how to make one smaller, and how to write one as text.

A case is the sizes and options from which the operator's `make` draws its arguments, such as
{"tokens": (16384,), "heads": 32, "kv_heads": 4, "dim": 128} or {"shape": (4096, 7168)}.
"""

from typing import Any

Values = dict[str, Any]


def shrink(case: Values, tokens: int) -> Values:
    """Return the case with at most `tokens` tokens per dimension.

    Every size in "tokens" is limited, or every size in "shape" but the last, which is the number of channels. A case
    with neither is returned unchanged, and so are the sequences of one that `has_sequences`.
    """
    small = dict(case)
    if "tokens" in case:
        small["tokens"] = tuple(min(n, tokens) for n in case["tokens"])
    elif "shape" in case:
        small["shape"] = (*(min(n, tokens) for n in case["shape"][:-1]), case["shape"][-1])
    return small


def has_sequences(case: Values) -> bool:
    """Return whether the case states how many tokens each sequence has."""
    return "lengths" in case or "queries" in case


def describe(case: Values) -> str:
    """Return a case as text, such as "16384 tokens, 32+4 heads x 128"; other options appear by name."""
    parts = []
    for name, value in case.items():
        if name in ("tokens", "shape"):
            parts.append(f"{'x'.join(map(str, value))}{' tokens' if name == 'tokens' else ''}")
        elif name == "heads":
            parts.append(f"{value}{'' if case.get('kv_heads') is None else '+' + str(case['kv_heads'])} heads")
        elif name == "dim":
            parts.append(f"of {value}")
        elif name != "kv_heads":
            parts.append(f"{name} {value}")
    return ", ".join(parts).replace(" heads, of ", " heads x ")
