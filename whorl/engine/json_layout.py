"""White space that a grammar allows in JSON: what a compact or an indented printer writes, and no more.

If any white space is allowed, a weak model writes little else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MOST_LEVELS = 8  # of indentation, if a schema does not limit the depth of its values
_WIDEST = 4  # spaces a level
_SAME_LEVEL = ("anyOf", "oneOf", "allOf")
_LISTS, _TABLES, _SINGLE = ("prefixItems",), ("properties", "patternProperties"), ("items", "additionalProperties")
_CONTAINERS = ("object", "array")


def json_layout(schema: Any) -> "JsonCompileOptions":
    """Return llguidance's options for values of a schema: a space after a comma or a colon, or a line break and as
    much indentation as the schema is deep. All white space is optional, so the limit forbids no value."""
    levels = max(1, _depth(schema, _MOST_LEVELS))
    return {
        "whitespace_pattern": rf"\n(\x20{{0,{levels * _WIDEST}}}|\t{{0,{levels}}})",
        "item_separator": r",\x20?",
        "key_separator": r":\x20?",
    }


def _depth(schema: Any, most: int) -> int:
    """Return how deep values of a schema may nest, up to `most`, which is also the result if it does not say."""
    if not isinstance(schema, dict):
        return most if schema is True else 0
    if "$ref" in schema:
        return most
    if "enum" in schema or "const" in schema:
        return 0
    same = [part for name in _SAME_LEVEL for part in _parts(schema.get(name))]
    inner = [part for name in (*_LISTS, *_TABLES) for part in _parts(schema.get(name))]
    inner += [schema[name] for name in _SINGLE if isinstance(schema.get(name), dict)]
    if not same and not inner:
        kinds = schema.get("type", _CONTAINERS)
        kinds = [kinds] if isinstance(kinds, str) else _parts(kinds)
        return most if any(kind in _CONTAINERS for kind in kinds) else 0
    below = [1 + _depth(part, most - 1) for part in inner] if most else []
    return min(most, max([*below, *(_depth(part, most) for part in same)], default=0))


def _parts(value: Any) -> list[Any]:
    """Return the elements of a list or the values of an object; a malformed schema has none and fails elsewhere."""
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
