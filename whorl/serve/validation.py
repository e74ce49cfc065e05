"""Turns the validation errors of a request's body into one API error."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .api_error import ApiError

_M = TypeVar("_M", bound=BaseModel)


def validated(schema: type[_M], fields: dict[str, Any]) -> _M:
    """Build a request from the fields that are not None; raise ApiError 400 for an invalid combination."""
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        return schema.model_validate(present)
    except ValidationError as error:
        raise validation_error(error.errors(), present) from None


def validation_error(errors: Any, body: Any) -> ApiError:
    """Return an ApiError 400 for one of pydantic's errors: of those at or below the place of the first, the deepest.

    For a field that may have several types, pydantic reports the errors of every type. The client most likely meant the
    type that was valid down to the deepest error. errors: pydantic's; body: the request's.
    """
    places = [_place(error, body) for error in errors]
    candidates = [i for i, place in enumerate(places) if place[: len(places[0])] == places[0]]
    chosen = max(candidates, key=lambda i: len(places[i]))
    place, error = places[chosen], errors[chosen]
    other_places = {other for other in places if other != place[: len(other)]}
    remark = f" (and {len(other_places)} more)" if other_places else ""
    param = ".".join(step[:100] for step in place) or None
    return ApiError(400, f"{param}: {_message(error)}{remark}" if param else f"{_message(error)}{remark}", param=param)


def _place(error: Any, body: Any) -> tuple[str, ...]:
    """Return an error's path in the body, without the tags of kinds that pydantic puts between the steps."""
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
