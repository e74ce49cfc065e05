"""The web page at `/`: one HTML document, and the numbers that it draws. It uses the API for everything else.

The document is put together from the files of this folder: `page.html`, a style, scripts, and the libraries in
`vendor`. The content security policy allows exactly these by their digests, so that nothing that a model writes can run
in the page.
"""

import base64
import functools
import gzip
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from whorl import __version__
from whorl.engine.reply_parser import END_THINK
from whorl.engine.roofline import decode_limit

from ..api_error import ApiError
from ..mcp import add_mcp

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..service import Service

_STYLE = "style.css"
_LIBRARIES = ("markdown-it", "highlight", "temml")  # each a script of its own, in `vendor`
# One script together, in this order.
_SCRIPTS = (
    "base",
    "store",
    "markdown",
    "tree",
    "mcp",
    "ask",
    "again",
    "view",
    "token",
    "compare",
    "engine",
    "files",
    "panels",
)
_EMBEDDED = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_MOST_RUNS, _MOST_SEQUENCES = 256, 64  # how many runs of blocks and sequences are drawn
_FRESH = 0.25  # seconds for which a snapshot is reused, however many pages are open: counting the blocks takes time
_POLICY = {
    "default-src": "'none'",
    "img-src": "data: blob:",
    "media-src": "data: blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Text cannot become markup, even by a mistake in the script.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent. packed: the text, compressed."""

    text: str
    packed: bytes
    headers: dict[str, str]


@functools.cache
def page(peers: tuple[str, ...] = ()) -> Page:
    """Return the page. peers: other servers that it may ask."""
    folder = resources.files(__package__)

    def read(*path: str) -> str:
        return folder.joinpath(*path).read_text(encoding="utf-8")

    script = '"use strict";\n' + "\n".join(read(f"{name}.js") for name in _SCRIPTS)
    scripts = [*(read("vendor", f"{name}.min.js") for name in _LIBRARIES), script]
    text = read("page.html").replace("<!-- style -->", f"<style>{read(_STYLE)}</style>")
    text = text.replace("<!-- scripts -->", "\n".join(f"<script>{script}</script>" for script in scripts))
    policy = _POLICY | {"connect-src": " ".join(("'self'", *peers))}
    for kind in ("script", "style"):
        digests = [f"'sha256-{_digest(inner)}'" for tag, inner in _EMBEDDED.findall(text) if tag == kind]
        policy[f"{kind}-src"] = " ".join(digests)
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{_digest(text)}"',
        "Vary": "Accept-Encoding",
    }
    return Page(text, gzip.compress(text.encode(), mtime=0), headers)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def add_page(app: "FastAPI", service: "Service", *, takes_images: bool) -> None:
    """Add the routes of the page."""
    from ..schemas import ErrorResponse

    numbers = PageNumbers(service, takes_images=takes_images)
    responses: dict[int | str, dict[str, Any]] = {code: {"model": ErrorResponse} for code in (401, 421, 500, 503)}
    app.add_api_route("/", _serving(service.settings.compare_with), methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/page/about", numbers.about, methods=["GET"], responses=responses)
    app.add_api_route("/page/stats", numbers.stats, methods=["GET"], responses=responses)
    codes = (400, 403, 408, 409, 413, 415, 429, 502)
    add_mcp(app, service.mcp, responses | dict.fromkeys(codes, responses[500]))


def _serving(peers: tuple[str, ...]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that sends the page, compressed if the browser can read that, or 304 if it has this one."""

    async def serve(request: Request) -> Response:
        whole = page(peers)
        if request.headers.get("if-none-match") == whole.headers["ETag"]:
            return Response(status_code=304, headers=whole.headers)
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        headers = whole.headers | ({"Content-Encoding": "gzip"} if is_packed else {})
        return Response(whole.packed if is_packed else whole.text, media_type="text/html", headers=headers)

    return serve


@dataclass(slots=True)
class _Snapshot:
    """The numbers of one moment. time: on the clock of `time.perf_counter`."""

    time: float
    value: dict[str, Any]


class PageNumbers:
    """The numbers that the page shows about the server."""

    def __init__(self, service: "Service", *, takes_images: bool) -> None:
        self._service, self._takes_images = service, takes_images
        self._snapshot: _Snapshot | None = None
        self._is_scheduled = self._is_measured = False  # the measurement of the memory's speed
        self._problem: str | None = None  # why there is no roofline

    async def about(self) -> dict[str, Any]:
        """Return what does not change: the model and its abilities."""
        service = self._service
        settings, llm = service.settings, service.engine.llm
        return {
            "version": __version__,
            "model": settings.names[0],
            "adapters": list(service.llm.adapters.by_name),
            "max_model_len": llm.max_model_len,
            "sees": self._takes_images,
            "thinks": service.tokenizer.token_id(END_THINK) is not None,
            "tools": "tools" in (service.tokenizer.template.sources.get("default") or ""),
            "drafted_by": service.drafted_by,
            "sampling": service.tokenizer.sampling,
            "mcp": service.mcp.about,
            "peers": list(settings.compare_with),
            "max_body": settings.max_media_body if self._takes_images else settings.max_body,
        }

    async def stats(self) -> Response:
        """Return what changes: generated tokens, sequences, blocks of the KV cache, the roofline."""
        if self._service.engine.failure is not None:
            raise ApiError(503, f"the engine failed: {self._service.engine.failure}", code="engine_unavailable")
        now = time.perf_counter()
        if self._snapshot is None or now - self._snapshot.time > _FRESH:
            self._snapshot = _Snapshot(now, self._current(now))
        return JSONResponse(self._snapshot.value)

    def _current(self, now: float) -> dict[str, Any]:
        """Return the numbers of this moment. Another thread runs the engine, so they may be a step apart."""
        engine = self._service.engine
        llm: Any = engine.llm
        running, waiting = list(llm.scheduler.running), list(llm.scheduler.waiting)
        return {
            "seconds": now,
            "num_generated": self._service.metrics.num_generated,
            "engine": llm.stats(),
            "queue": {"num_waiting": engine.num_waiting, "most": engine.max_queue},
            "running": [
                {"prompt": s.prompt_len, "computed": s.num_computed, "outputs": s.num_outputs}
                for s in running[:_MOST_SEQUENCES]
            ],
            "waiting": [s.prompt_len for s in waiting[:_MOST_SEQUENCES]],
            "blocks": {
                "size": llm.pool.block_size,
                "run": -(-llm.pool.num_blocks // _MOST_RUNS),
                "held_shared_kept": llm.pool.census(_MOST_RUNS),
            },
            "roofline": self._roofline(llm, running),
        }

    def _roofline(self, llm: Any, running: list[Any]) -> dict[str, Any] | None:
        """Return the decode roofline of the current batch.

        None until the speed of this machine's memory has been measured, which waits until the engine is idle.
        """
        if self._problem is not None:
            return {"problem": self._problem}
        if not self._is_measured:
            if self._service.engine.readiness.is_ready and not self._is_scheduled:
                self._is_scheduled = True
                self._service.engine.when_idle(lambda: self._measure(llm))
            elif not llm.has_work:
                self._is_scheduled = False  # the command was dropped because the engine was busy: schedule it again
            return None
        batch = max(1, len(running))
        context = sum(len(seq.token_ids) for seq in running) // batch
        together = decode_limit(llm.model, batch=batch, context=context)
        assert together is not None
        return {"sequences": batch, "context": context, "one": together / batch, "all": together}

    def _measure(self, llm: Any) -> None:
        """Measure the speed of the memory; runs on the engine's thread."""
        try:
            self._is_measured = decode_limit(llm.model) is not None
            if not self._is_measured:
                self._problem = "this model does not say what a step reads"
        except RuntimeError as error:  # no memory for the copy, for example when the KV cache uses all of it
            self._problem = f"the speed of memory could not be measured: {str(error).partition(chr(10))[0]}"
