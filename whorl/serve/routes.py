"""The routes of the server, and what /openapi.json says about them."""

from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse

from . import answer_schemas as answers
from . import turn_answers as turns
from .embeddings import EmbeddingsApi
from .message_schemas import MessagesError
from .messages import MessagesApi
from .reference import reference
from .responses import ResponsesApi
from .schemas import ErrorResponse
from .token_generation import TokensApi

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .service import Service


def add_routes(app: "FastAPI", service: "Service") -> None:
    """Add every route with its handler, the schema of its answer and the statuses of its errors."""

    def refusing(*codes: int) -> dict[int | str, dict[str, Any]]:
        return {code: {"model": ErrorResponse} for code in codes}

    usual = refusing(400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)
    anthropic: dict[int | str, dict[str, Any]] = {code: {"model": MessagesError} for code in usual}
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    responses, messages = ResponsesApi(service), MessagesApi(service)
    embeddings = EmbeddingsApi(service, service.settings.pooling)
    for path, method, function, answer, refusals in (
        ("/v1/chat/completions", "POST", service.chat_completions, _streamed(answers.ChatCompletion), usual),
        ("/v1/completions", "POST", service.completions, _streamed(answers.Completion), usual),
        ("/v1/responses", "POST", responses.create, _streamed(turns.Response), usual),
        ("/v1/responses/input_tokens", "POST", responses.input_tokens, {"model": turns.InputTokens}, usual),
        ("/v1/messages", "POST", messages.create, _streamed(turns.MessageAnswer), anthropic),
        ("/v1/messages/count_tokens", "POST", messages.count_tokens, {"model": turns.MessageTokens}, anthropic),
        ("/v1/embeddings", "POST", embeddings.create, {"model": answers.Embeddings}, usual),
        ("/inference/v1/generate", "POST", TokensApi(service).generate, _streamed(answers.GeneratedIds), usual),
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


def _streamed(model: Any) -> dict[str, Any]:
    """Describe an answer that is one object, or with `stream` a series of events, of which the schema shows one."""
    lines = {"event": {"type": "string"}, "data": {"type": "string"}}
    event = {"type": "object", "properties": lines, "required": ["data"]}
    return {"model": model, "content": {"text/event-stream": {"schema": event}}}
