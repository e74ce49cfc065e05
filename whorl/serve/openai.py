"""`whorl serve`: OpenAI's HTTP interface over the engine. Start reading here; `service` does the work of each route.

FastAPI and its dependencies are imported inside functions, so that without the extra this module can still say how to
install it.
"""

import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.extras import need_server
from whorl.startup import starting

from .hosts import check_address, hosts_for
from .settings import ServerSettings, names_for

if TYPE_CHECKING:
    from fastapi import FastAPI

    from whorl.engine.llm import LLM
    from whorl.media import Processor

_LOG = logging.getLogger("whorl.serve")


def create_app(llm: "LLM", settings: ServerSettings, processor: "Processor | None" = None) -> "FastAPI":
    """Build the ASGI application; `app.state.service` holds its `Service`.

    The engine's thread runs from the application's start-up to its shutdown. processor: reads the pictures and videos
    of a vision model; None: the model takes text only. Raises ValueError when the extra `serve` is not installed.

    Example: `uvicorn.run(create_app(LLM("Qwen/Qwen3-0.6B"), ServerSettings(names=("qwen",))))`.
    """
    need_server()
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    from whorl import __version__

    from .api_error import ApiError
    from .body import MAX_VALUES, json_route
    from .dialects import error_response
    from .gate import Cors, Gate
    from .page import add_page
    from .routes import add_routes
    from .service import Service
    from .validation import validation_error

    service = Service(llm, settings, processor)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="whorl", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.router.route_class = json_route()
    add_routes(app, service)
    add_page(app, service, takes_images=processor is not None)
    for add in settings.more_routes:
        add(app, service)

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(ApiError.from_exception(error), request.scope)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors(), error.body), request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # what `Body.parse` raised
            return error_response(error.__cause__, request.scope)
        reason = {
            404: "no such endpoint; GET /docs and /openapi.json list all of them",
            405: f"this endpoint takes {(error.headers or {}).get('Allow', 'another method')}",
        }.get(error.status_code, error.detail)
        message = f"{request.method} {request.url.path}: {reason}"
        return error_response(ApiError(error.status_code, message, headers=error.headers), request.scope)

    for kind in (ApiError, ValueError, RuntimeError, TimeoutError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_middleware(
        Gate,
        settings=settings,
        running=service.running,
        uses=service.uses,
        max_values=max(MAX_VALUES, 2 * llm.max_model_len),  # a prompt of token ids as long as the context
        takes_media=processor is not None,
    )
    if settings.origins:
        app.add_middleware(Cors, origins=settings.origins)
    return app


def build_server(
    model: str | Path | None = None,
    engine: EngineSettings | None = None,
    *,
    drafting: DraftOptions | None = None,
    llm: "LLM | None" = None,
    processor: "Processor | None" = None,
    report: bool = False,
    **settings: Any,
) -> Callable[[], int]:
    """Load the model and return a function that serves it and returns the exit code.

    The exit code is 0, or 1 when requests had to be cut off. The function serves until SIGTERM or Ctrl-C; then running
    requests finish and new ones are refused. Raises ValueError for options that cannot be honoured.

    model, engine: as `LLM` takes them; or pass a loaded `llm`, with the `processor` of its pictures. drafting: the
    options of speculative decoding; None: off. report: print the report of sequence parallelism to stderr. settings:
    the other arguments of `settings_for`.

    Example: `exit_code = build_server("Qwen/Qwen3-0.6B", port=8000, api_key="secret")()`.
    """
    chosen = settings_for(model, **settings)
    check_address(chosen.host, chosen.port)  # before minutes of loading
    if llm is None:
        app = load_app(model, engine or EngineSettings(), drafting or DraftOptions(), chosen)
    else:
        app = create_app(llm, chosen, processor)
    if report:
        from whorl.engine.sequence_parallel import describe

        print(describe(app.state.service.engine.llm.sp_report), file=sys.stderr)
    return lambda: _serve(app, chosen)


def settings_for(
    model: str | Path | None,
    *,
    host: str = "127.0.0.1",
    names: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    chat_template: str | Path | None = None,
    api_key_file: str | Path | None = None,
    **settings: Any,
) -> ServerSettings:
    """Build `ServerSettings`, reading the files that arguments name.

    names: default: the model's path or id. allowed_hosts: default: this machine's names when `host` is a loopback
    address, else any. chat_template: a file; None: the model's own template. api_key_file: see `key_limits.read_keys`.
    settings: other fields of `ServerSettings`.
    """
    need_server()
    from .key_limits import read_keys

    return ServerSettings(
        host=host,
        names=tuple(names) or names_for(model),
        allowed_hosts=hosts_for(host, allowed_hosts),
        chat_template=None if chat_template is None else _read_template(Path(chat_template)),
        more_keys=() if api_key_file is None else read_keys(api_key_file),
        **settings,
    )


def load_app(
    model: str | Path | None, engine: EngineSettings, drafting: DraftOptions, settings: ServerSettings
) -> "FastAPI":
    """Load the model and build the application that serves it."""
    llm = _load(model, engine, drafting)  # first: it imports torch
    from .embeddings import read_pooling

    processor = _processor(model, llm, settings)
    folder = getattr(llm.tokenizer, "folder", None)
    pooling = None if folder is None else read_pooling(folder)
    return create_app(llm, replace(settings, pooling=pooling), processor)


def _processor(model: str | Path | None, llm: "LLM", settings: ServerSettings) -> "Processor | None":
    """Build the processor of a model that has a vision tower; None for other models."""
    if getattr(llm.model, "tower", None) is None:
        return None
    from whorl.engine.weights import resolve
    from whorl.media import Processor

    return Processor.from_folder(resolve(model), settings.media)


def _load(model: str | Path | None, engine: EngineSettings, drafting: DraftOptions) -> "LLM":
    with starting():
        from whorl.engine.llm import LLM
        from whorl.engine.load import use_one_stream

    use_one_stream(engine)
    speculate = drafting.proposer(engine.device)
    # The warm-up runs once the server listens, so that /health can report its progress.
    return LLM(model, engine, speculate=speculate, draft_length=drafting.draft_length, warm=False)


def run(model: str | Path | None = None, engine: EngineSettings | None = None, **options: Any) -> int:
    """Load the model and serve it until SIGTERM or Ctrl-C; returns the exit code. Arguments: as `build_server`."""
    return build_server(model, engine, **options)()


def _serve(app: "FastAPI", settings: ServerSettings) -> int:
    from whorl.engine.heap import keep_objects

    from .http_server import HttpServer
    from .request_log import begin_log

    begin_log(settings)
    server = HttpServer(app)
    engine = app.state.service.engine

    def end() -> None:
        server.should_exit = True

    engine.on_failure = end
    server.listen()
    if (kind := app.state.service.warmup) != "off":
        _LOG.info("warming up (%s): %s/v1 answers 503 until it is ready", kind, server.root)
    engine.readiness.on_warm = keep_objects
    engine.readiness.on_ready = server.log_ready
    server.run(sockets=server.listeners)
    if engine.failure is not None:
        raise RuntimeError(f"serve: the engine failed: {engine.failure}") from engine.failure
    return server.exit_code


def _read_template(path: Path) -> str:
    """Return a chat template's text; raise ValueError when the file cannot be read or is not a template."""
    from whorl.engine.chat_template import ChatTemplate

    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"serve: --chat-template {path}: cannot be read: {error}") from error
    ChatTemplate({"default": text}, {})
    return text
