"""The routes of the server, what /openapi.json says about them, and the page at /docs that is written from that."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse

from . import answer_schemas as answers
from .adapters import AdaptersApi
from .embeddings import EmbeddingsApi
from .message_schemas import MessagesError
from .messages import MessagesApi
from .ollama import OllamaApi
from .refused_fields import REFUSED
from .rendering import RenderApi
from .responses import ResponsesApi
from .schemas import ErrorResponse
from .token_generation import TokensApi

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .service import Service

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #8884;padding:.2rem .6rem .2rem 0;"
    "vertical-align:top}code{font:13px ui-monospace,monospace}@media(prefers-color-scheme:dark)"
    "{body{background:#16181d;color:#ddd}a{color:#8ab4f8}}"
)


def add_routes(app: "FastAPI", service: "Service") -> None:
    """Add every route with its handler, the schema of its answer and the statuses of its errors."""

    def refusing(*codes: int) -> dict[int | str, dict[str, Any]]:
        return {code: {"model": ErrorResponse} for code in codes}

    usual = refusing(400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)
    anthropic: dict[int | str, dict[str, Any]] = {code: {"model": MessagesError} for code in usual}
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    responses, messages = ResponsesApi(service), MessagesApi(service)
    adapters = AdaptersApi(service)
    embeddings = EmbeddingsApi(service, service.settings.pooling)
    ollama = OllamaApi(service, embeddings)
    theirs: dict[int | str, dict[str, Any]] = {code: {"model": answers.OllamaError} for code in usual}
    lines = "application/x-ndjson"
    for path, method, function, answer, refusals in (
        ("/v1/chat/completions", "POST", service.chat_completions, _streamed(answers.ChatCompletion), usual),
        ("/v1/chat/completions/render", "POST", RenderApi(service).render, {"model": answers.Rendered}, usual),
        ("/v1/completions", "POST", service.completions, _streamed(answers.Completion), usual),
        ("/v1/responses", "POST", responses.create, _streamed(answers.Response), usual),
        ("/v1/responses/input_tokens", "POST", responses.input_tokens, {"model": answers.InputTokens}, usual),
        ("/v1/messages", "POST", messages.create, _streamed(answers.MessageAnswer), anthropic),
        ("/v1/messages/count_tokens", "POST", messages.count_tokens, {"model": answers.MessageTokens}, anthropic),
        ("/v1/embeddings", "POST", embeddings.create, {"model": answers.Embeddings}, usual),
        ("/api/chat", "POST", ollama.chat, _streamed(answers.OllamaMessageLine, lines), theirs),
        ("/api/generate", "POST", ollama.generate, _streamed(answers.OllamaTextLine, lines), theirs),
        ("/api/embed", "POST", ollama.embed, {"model": answers.OllamaVectors}, theirs),
        ("/api/embeddings", "POST", ollama.embedding, {"model": answers.OllamaVector}, theirs),
        ("/api/show", "POST", ollama.show, {"model": answers.OllamaShown}, theirs),
        ("/api/tags", "GET", ollama.tags, {"model": answers.OllamaModels}, theirs),
        ("/api/ps", "GET", ollama.running, {"model": answers.OllamaModels}, theirs),
        ("/api/version", "GET", ollama.version, {}, theirs),
        ("/inference/v1/generate", "POST", TokensApi(service).generate, _streamed(answers.GeneratedIds), usual),
        ("/v1/load_lora_adapter", "POST", adapters.load, text, usual),
        ("/v1/unload_lora_adapter", "POST", adapters.unload, text, usual),
        ("/v1/models", "GET", service.models, {"model": answers.ModelList}, usual),
        ("/v1/models/{name:path}", "GET", service.model, {"model": answers.ModelCard}, usual),
        ("/tokenize", "POST", service.tokenize, {"model": answers.Tokens}, usual),
        ("/detokenize", "POST", service.detokenize, {"model": answers.Detokenized}, usual),
        ("/tokenizer_info", "GET", service.tokenizer_info, {}, usual),
        ("/health", "GET", service.health, {"model": answers.Health}, refusing(403, 421, 503)),
        ("/metrics", "GET", service.prometheus, text, refusing(403, 421, 500, 503)),
        ("/version", "GET", service.version, {}, refusing(401, 403, 421, 503)),
    ):
        app.add_api_route(path, function, methods=[method], responses={200: answer, **refusals})
    app.add_api_route("/docs", lambda: HTMLResponse(reference(app.openapi())), include_in_schema=False)


def _streamed(model: Any, media_type: str = "text/event-stream") -> dict[str, Any]:
    """Describe an answer that is one object, or with `stream` a series of events, of which the schema shows one."""
    if media_type != "text/event-stream":  # lines, each like the whole
        return {"model": model, "content": {media_type: {"schema": {"type": "object"}}}}
    lines = {"event": {"type": "string"}, "data": {"type": "string"}}
    event = {"type": "object", "properties": lines, "required": ["data"]}
    return {"model": model, "content": {"text/event-stream": {"schema": event}}}


def reference(openapi: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document: every endpoint and the fields of its requests. It loads nothing."""
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
