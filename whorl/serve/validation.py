"""What is wrong with a body, as one error."""

import json
from typing import Any

from .gate import ApiError


def validation_error(errors: Any, body: Any) -> ApiError:
    """FastAPI's list of what is wrong with a body, as one error: the first, as deep in the body as it goes.

    Of a field that may be one of several kinds, each kind complains; the one that got furthest was meant.
    """
    if errors[0].get("type") == "json_invalid":
        reason = json.dumps(str(errors[0].get("ctx", {}).get("error", "")))
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    places = [_place(error, body) for error in errors]
    meant = [i for i, place in enumerate(places) if place[: len(places[0])] == places[0]]
    chosen = max(meant, key=lambda i: len(places[i]))
    place, error = places[chosen], errors[chosen]
    others = {other for other in places if other != place[: len(other)]}
    more = f" (and {len(others)} more)" if others else ""
    param = ".".join(step[:100] for step in place) or None
    return ApiError(400, f"{param}: {_message(error)}{more}" if param else f"{_message(error)}{more}", param=param)


def _place(error: Any, body: Any) -> tuple[str, ...]:
    """Where in the body, without the names of the kinds that a field may have, which stand between."""
    steps = [step for step in error.get("loc", ()) if step != "body"]
    place = []
    for index, step in enumerate(steps):
        is_absent = error.get("type") == "missing" and index == len(steps) - 1
        if isinstance(body, dict) and str(step) in body:
            body = body[str(step)]
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            body = body[step]
        elif not is_absent:
            continue
        place.append(str(step))
    return tuple(place)


def _message(error: Any) -> str:
    message = str(error.get("msg", "invalid")).removeprefix("Value error, ")
    if error.get("type") == "extra_forbidden":
        return "is not a parameter that this server knows"
    if error.get("type") == "literal_error" and isinstance(error.get("input"), str):
        return f"{message}, not {error['input'][:40]!r}"
    return message
