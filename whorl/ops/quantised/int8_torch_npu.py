"""To come."""

from typing import Any


def reason(**_: Any) -> str | None:
    return "not yet"


def experts_reason(**_: Any) -> str | None:
    return "not yet"
