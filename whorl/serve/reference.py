"""The page at /docs: every endpoint and the fields of its requests, written from /openapi.json. It loads nothing."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from .refused_fields import REFUSED

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #8884;padding:.2rem .6rem .2rem 0;"
    "vertical-align:top}code{font:13px ui-monospace,monospace}@media(prefers-color-scheme:dark)"
    "{body{background:#16181d;color:#ddd}a{color:#8ab4f8}}"
)


def reference(openapi: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    schemas = openapi["components"]["schemas"]
    title = escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>',
    ]
    for path, methods in openapi["paths"].items():
        for method, about in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(about.get('description', ''))}"
            )
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                parts += ["<table>", *_rows(schemas[_name(body)]), "</table>"]
    return "\n".join(parts)


def _rows(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    fields = schema["properties"].items()
    for name, field in sorted(fields, key=lambda field: field[1].get("description", "").startswith(REFUSED)):
        note = (
            "required" if name in required else f"default {json.dumps(field['default'])}" if "default" in field else ""
        )
        cells = (f"<code>{escape(name)}</code>", *map(escape, (_kind(field), note, field.get("description", ""))))
        yield "<tr><td>" + "<td>".join(cells)


def _kind(field: Mapping[str, Any]) -> str:
    """Name the values that a field takes."""
    if "$ref" in field:
        return _name(field)
    if (values := field.get("enum", [field["const"]] if "const" in field else None)) is not None:
        return " or ".join(map(json.dumps, values))
    for several in ("anyOf", "oneOf"):
        if several in field:
            return " or ".join(dict.fromkeys(map(_kind, field[several])))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
