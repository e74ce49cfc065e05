"""Cases of an operator: written as text, and with fewer tokens."""

from typing import Any

Values = dict[str, Any]


def shrink(case: Values, tokens: int) -> Values:
    """Return the case with each size but the last limited to `tokens`; the width of a row stays."""
    small = dict(case)
    if "tokens" in case:
        small["tokens"] = tuple(min(n, tokens) for n in case["tokens"])
    elif "shape" in case:
        small["shape"] = (*(min(n, tokens) for n in case["shape"][:-1]), case["shape"][-1])
    return small


def describe(case: Values) -> str:
    """Return a case as text: sizes joined by x, everything else by name."""
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
