"""`whorl serve`: OpenAI's HTTP interface over the engine. Start reading here; each address's work is in `service`.

FastAPI and what comes with it are imported inside: without the extra, this module still says how to get it.
"""

import importlib.util
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from whorl.engine.llm import LLM

    from .command import Options

_LOG = logging.getLogger("whorl.serve")
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
_JOB = ("job_seconds", "job_memory")
DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """names: what clients may call the model, the first is its own. Sizes in bytes, times in seconds.

    max_queue: sequences, of requests without a token yet. timeout: of a whole request. drain: for running requests
    after SIGTERM. stall: a step this long, or a prompt that waits this long for a worker, makes the server unhealthy.
    origins: whose web pages may ask. job: what a prompt's template and tokens may take of a worker, in CPU time; a
    schema half the time and a quarter of the memory.
    """

    names: tuple[str, ...] = (DEFAULT_NAME,)
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    max_body: int = 4 << 20
    max_queue: int = 1024
    timeout: float = 600.0
    body_seconds: float = 30.0
    drain_seconds: float = 60.0
    stall_seconds: float = 120.0
    job_seconds: float = 10.0
    job_memory: int = 1 << 30

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"serve: the model's names are {self.names}, at least one is needed")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("serve: the API key is empty; leave it out to serve without one")
        for name in ("max_body", "max_queue", "timeout", "body_seconds", "drain_seconds", "stall_seconds", *_JOB):
            if not getattr(self, name) > 0:
                raise ValueError(f"serve: {name} is {getattr(self, name)}, expected more than 0")


def need_extra() -> None:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve: {', '.join(missing)} not installed: pip install 'whorl[serve]'")


def create_app(llm: "LLM", settings: Settings) -> "FastAPI":
    """The application; `app.state.service` is what answers. Its engine runs from start-up to shutdown."""
    need_extra()
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import Request
    from starlette.responses import Response

    from whorl import __version__

    from .gate import ApiError, Gate, validation_error
    from .service import Service

    service = Service(llm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="whorl", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_routes(app, service)

    async def on_error(request: Request, error: Exception) -> Response:
        return ApiError.of(error).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors(), error.body).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {
            404: "no such address; GET /openapi.json lists those there are",
            405: f"this address takes {(error.headers or {}).get('Allow', 'another method')}",
        }.get(error.status_code, error.detail)
        message = f"{request.method} {request.url.path}: {what}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    for kind in (ApiError, ValueError, RuntimeError, TimeoutError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_middleware(Gate, api_key=settings.api_key, max_body=settings.max_body, body_seconds=settings.body_seconds)
    if settings.origins:
        names = list(settings.origins)
        app.add_middleware(CORSMiddleware, allow_origins=names, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_routes(app: "FastAPI", service: Any) -> None:
    from .schemas import ErrorResponse

    def refusing(*codes: int) -> dict[int | str, dict[str, Any]]:
        return {code: {"model": ErrorResponse} for code in codes}

    generating, reading = refusing(400, 401, 404, 408, 413, 415, 429, 503), refusing(400, 401, 404, 408, 413, 415)
    for path, method, function, responses in (
        ("/v1/chat/completions", "POST", service.chat_completions, generating),
        ("/v1/completions", "POST", service.completions, generating),
        ("/v1/models", "GET", service.models, reading),
        ("/v1/models/{name:path}", "GET", service.model, reading),
        ("/tokenize", "POST", service.tokenize, reading),
        ("/detokenize", "POST", service.detokenize, reading),
        ("/tokenizer_info", "GET", service.tokenizer_info, reading),
        ("/health", "GET", service.health, refusing(503)),
        ("/metrics", "GET", service.prometheus, refusing()),
        ("/version", "GET", service.version, refusing(401)),
    ):
        app.add_api_route(path, function, methods=[method], responses=responses)


def prepare(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    names: Sequence[str] = (),
    dtype: str | None = None,
    drafting: "Options | None" = None,
    llm: "LLM | None" = None,
    device: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    tp: int | None = None,
    sp: Any = "off",
    sp_quantize: Any = None,
    report: bool = False,
    **settings: Any,
) -> Callable[[], None]:
    """Load the model, refusing with ValueError what cannot be done; the work that is returned serves it.

    It serves until SIGTERM or Ctrl-C; then running requests finish and new ones are refused.
    model: as `LLM` takes it, or hand in an `llm`. names: what clients may call it; default: the model's own name.
    drafting: what `whorl generate` takes about speculation; None: none. settings: fields of `Settings`.
    """
    need_extra()
    chosen = Settings(names=tuple(names) or _names(model), **settings)
    _check_address(host, port)  # before minutes of loading
    if llm is None:
        import torch

        from whorl.engine.llm import LLM

        from .command import proposer

        llm = LLM(
            model,
            device=device,
            dtype=getattr(torch, dtype) if dtype else None,
            speculate=None if drafting is None else proposer(drafting),
            draft_length="fixed" if drafting is not None and drafting.draft_fixed else "measured",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            tp=tp,
            sp=sp,
            sp_quantize=sp_quantize,
            max_num_batched_tokens=max(2048, max_num_seqs),
        )
    if report:
        from .command import print_report

        print_report(llm)
    app = create_app(llm, chosen)
    return lambda: _serve(app, chosen, host, port)


def run(model: str | Path | None = None, **options: Any) -> None:
    """`prepare`, then serve."""
    prepare(model, **options)()


def _serve(app: "FastAPI", settings: Settings, host: str, port: int) -> None:
    import uvicorn

    logging.basicConfig(level=logging.INFO, format="%(levelname)s:     %(message)s")  # as uvicorn writes
    drain = max(1, round(settings.drain_seconds))
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=drain))
    engine = app.state.service.engine

    def end() -> None:
        server.should_exit = True

    engine.on_failure = end
    _LOG.info("serving %s", settings.names[0])
    server.run()
    if engine.failure is not None:
        raise RuntimeError(f"serve: the engine failed: {engine.failure}") from engine.failure


def _check_address(host: str, port: int) -> None:
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
    except OSError as error:
        raise ValueError(f"serve: cannot listen on {host}, port {port}: {error.strerror}") from error


def _names(model: str | Path | None) -> tuple[str, ...]:
    """The model's path or id, and its last part."""
    if model is None:
        return (DEFAULT_NAME,)
    text = str(model).rstrip("/")
    last = text.rsplit("/", 1)[-1]
    return (text,) if last == text else (text, last)
