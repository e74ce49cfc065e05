"""White space in JSON that a grammar forces: what a compact or an indented printer writes, and no more.

Where any of it may stand, a weak model writes little else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MOST_LEVELS = 8  # of indentation, where a schema does not say how deep its values are
_WIDEST = 4  # spaces a level
_SAME_LEVEL = ("anyOf", "oneOf", "allOf")
_LISTS, _TABLES, _SINGLE = ("prefixItems",), ("properties", "patternProperties"), ("items", "additionalProperties")
_CONTAINERS = ("object", "array")


def json_layout(schema: Any) -> "JsonCompileOptions":
    """llguidance's options for values of a schema: a space behind a comma or a colon, or a line break and as much
    indentation as the schema is deep. All of it may be left out, so a limit forbids no value."""
    levels = max(1, _depth(schema, _MOST_LEVELS))
    return {
        "whitespace_pattern": rf"\n(\x20{{0,{levels * _WIDEST}}}|\t{{0,{levels}}})",
        "item_separator": r",\x20?",
        "key_separator": r":\x20?",
    }


def _depth(schema: Any, most: int) -> int:
    """How deep values of a schema may nest, up to `most`, which is also the answer where it does not say."""
    if not isinstance(schema, dict):
        return most if schema is True else 0
    if "$ref" in schema:
        return most
    if "enum" in schema or "const" in schema:
        return 0
    same = [one for name in _SAME_LEVEL for one in _each(schema.get(name))]
    inner = [one for name in (*_LISTS, *_TABLES) for one in _each(schema.get(name))]
    inner += [schema[name] for name in _SINGLE if isinstance(schema.get(name), dict)]
    if not same and not inner:
        kinds = schema.get("type", _CONTAINERS)
        return most if any(kind in _CONTAINERS for kind in ([kinds] if isinstance(kinds, str) else _each(kinds))) else 0
    below = [1 + _depth(one, most - 1) for one in inner] if most else []
    return min(most, max([*below, *(_depth(one, most) for one in same)], default=0))


def _each(found: Any) -> list[Any]:
    """The parts of a list or a table; a schema that is malformed has none, and is refused elsewhere."""
    return list(found.values()) if isinstance(found, dict) else list(found) if isinstance(found, list | tuple) else []
