"""`whorl serve`: OpenAI's HTTP interface over the engine. Start usual here; each address's work is in `service`.

FastAPI and what comes with it are imported inside: without the extra, this module still says how to get it.
"""

import importlib.util
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings

from .address import check_address
from .settings import ServerSettings, names_for

if TYPE_CHECKING:
    from fastapi import FastAPI

    from whorl.engine.llm import LLM
    from whorl.media import Processor

_LOG = logging.getLogger("whorl.serve")
# Addresses whose messages may hold pictures.
WITH_MEDIA = (
    *("/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def need_extra() -> None:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve: {', '.join(missing)} not installed: pip install 'whorl[serve]'")


def create_app(llm: "LLM", settings: ServerSettings, processor: "Processor | None" = None) -> "FastAPI":
    """The application; `app.state.service` is what answers. Its engine runs from start-up to shutdown.

    processor: of the model's pictures and videos; None: it takes none.
    """
    need_extra()
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    from whorl import __version__

    from .dialects import refusal
    from .gate import ApiError, Cors, Gate
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
    add_routes(app, service)
    add_page(app, service, sees=processor is not None)

    async def on_error(request: Request, error: Exception) -> Response:
        return refusal(ApiError.of(error), request.scope)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refusal(validation_error(error.errors(), error.body), request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {
            404: "no such address; GET /openapi.json lists those there are",
            405: f"this address takes {(error.headers or {}).get('Allow', 'another method')}",
        }.get(error.status_code, error.detail)
        message = f"{request.method} {request.url.path}: {what}"
        return refusal(ApiError(error.status_code, message, headers=error.headers), request.scope)

    for kind in (ApiError, ValueError, RuntimeError, TimeoutError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_middleware(
        Gate,
        running=service.running,
        keys=settings.keys,
        allowed_hosts=settings.allowed_hosts,
        origins=settings.origins,
        uses=service.uses,
        max_body=settings.max_body,
        body_seconds=settings.body_seconds,
        larger=None if processor is None else dict.fromkeys(WITH_MEDIA, settings.max_media_body),
    )
    if settings.origins:
        names = list(settings.origins)
        app.add_middleware(Cors, allow_origins=names, allow_methods=["*"], allow_headers=["*"])
    return app


def prepare(
    model: str | Path | None = None,
    engine: EngineSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    names: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    chat_template: str | Path | None = None,
    api_key_file: str | Path | None = None,
    drafting: DraftOptions | None = None,
    llm: "LLM | None" = None,
    processor: "Processor | None" = None,
    report: bool = False,
    **settings: Any,
) -> Callable[[], int]:
    """Load the model, refusing with ValueError what cannot be done; the work that is returned serves it, and gives the
    exit code: 0, or 1 where requests had to be ended.

    It serves until SIGTERM or Ctrl-C; then running requests finish and new ones are refused.
    allowed_hosts: names in Host that are taken; default: this machine's where `host` is, else any.
    model, engine: as `LLM` takes them, or hand in an `llm`, and with it the `processor` of its pictures. names: what
    clients may call the model; default: its own. drafting: what commands take about speculation; None: none.
    chat_template: a file; None: the model's own template. api_key_file: see `key_limits.read_keys`.
    settings: fields of `ServerSettings`.
    """
    chosen = settings_for(
        model,
        host=host,
        names=names,
        allowed_hosts=allowed_hosts,
        chat_template=chat_template,
        api_key_file=api_key_file,
        **settings,
    )
    check_address(host, port)  # before minutes of loading
    if llm is None:
        app = loaded(model, engine or EngineSettings(), drafting or DraftOptions(), chosen)
    else:
        app = create_app(llm, chosen, processor)
    if report:
        from whorl.engine.sequence_parallel import describe

        print(describe(app.state.service.engine.llm.sp_report), file=sys.stderr)
    return lambda: _serve(app, chosen, host, port)


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
    """As `prepare` takes them, files read."""
    need_extra()
    from .hosts import hosts_for
    from .key_limits import read_keys

    return ServerSettings(
        names=tuple(names) or names_for(model),
        allowed_hosts=hosts_for(host, allowed_hosts),
        chat_template=None if chat_template is None else _read_template(Path(chat_template)),
        more_keys=() if api_key_file is None else read_keys(api_key_file),
        **settings,
    )


def loaded(
    model: str | Path | None, engine: EngineSettings, drafting: DraftOptions, settings: ServerSettings
) -> "FastAPI":
    """The application over a model that is loaded for it."""
    from .embeddings import read_pooling

    llm = _load(model, engine, drafting)
    processor = _processor(model, llm, settings)
    folder = getattr(llm.tokenizer, "folder", None)
    pooling = None if folder is None else read_pooling(folder)
    return create_app(llm, replace(settings, pooling=pooling), processor)


def _processor(model: str | Path | None, llm: "LLM", settings: ServerSettings) -> "Processor | None":
    """Of a model that has a tower for pictures."""
    if getattr(llm.model, "tower", None) is None:
        return None
    from whorl.engine.weights import resolve
    from whorl.media import Processor

    return Processor.from_folder(resolve(model), settings.media)


def _load(model: str | Path | None, engine: EngineSettings, drafting: DraftOptions) -> "LLM":
    from whorl.engine.llm import LLM

    speculate = drafting.proposer(engine.device)
    # It warms up when the server listens, which then says how far it is.
    return LLM(model, engine, speculate=speculate, draft_length=drafting.draft_length, warm=False)


def run(model: str | Path | None = None, engine: EngineSettings | None = None, **options: Any) -> int:
    """`prepare`, then serve."""
    return prepare(model, engine, **options)()


def _serve(app: "FastAPI", settings: ServerSettings, host: str, port: int) -> int:
    from .connections import listen
    from .hosts import is_loopback
    from .http_server import HttpServer
    from .log_limit import limit_logs
    from .request_log import number_logs

    logging.basicConfig(level=logging.INFO, format="%(levelname)s:     %(message)s")  # as uvicorn writes
    server = HttpServer(app, access_log=False)  # the gate writes a line a request, with its number
    limit_logs()  # after uvicorn has set its loggers up
    number_logs()
    engine = app.state.service.engine

    def end() -> None:
        server.should_exit = True

    engine.on_failure = end
    if not is_loopback(host) and not settings.keys:
        _LOG.warning(
            "%s can be reached from other machines, and there is no --api-key or --api-key-file: anybody may ask", host
        )
    listeners = listen(host, port)
    root = f"http://{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}"
    where = f"{root}/v1"
    if (kind := app.state.service.warmup) != "off":
        _LOG.info("warming up (%s): %s answers 503 until it is ready", kind, where)
    ready = f"ready: serving {settings.names[0]} at {where}, with a page to talk to it at {root}/"
    engine.readiness.on_ready = lambda: _LOG.info(ready)
    server.run(sockets=list(listeners))
    if engine.failure is not None:
        raise RuntimeError(f"serve: the engine failed: {engine.failure}") from engine.failure
    return server.exit_code


def _read_template(path: Path) -> str:
    """Its text; ValueError where it cannot be read, or is no template."""
    from whorl.engine.chat_template import ChatTemplate

    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"serve: --chat-template {path}: cannot be read: {error}") from error
    ChatTemplate({"default": text}, {})
    return text
