"""`/page/mcp`: the tools of MCP servers for the page. Off unless `--mcp-server` names servers, or this machine's own.

The server calls them for the page, as most of them take no requests from web pages. So that this reaches no other
service, the page may name only what the option has, and gets back only what the protocol says (`mcp_client`).
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field
from starlette.responses import JSONResponse, Response

from .answer_schemas import Answer
from .api_error import ApiError
from .fair_slots import FairSlots
from .mcp_client import LOOPBACK, Line, McpClient, McpError, Session, is_local, parse_url
from .schema_parts import Strict

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .settings import ServerSettings

_LIST_SECONDS, _CALL_SECONDS = 20.0, 300.0
_NUM_CALLS = 8  # at the same time
_STATUS = {"mcp_failed": 502, "mcp_refused": 403, "mcp_session_lost": 409}
_R = TypeVar("_R")

Url = Annotated[str, Field(min_length=1, max_length=8192)]


class McpServer(Strict):
    url: Url


class McpCall(McpServer):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    version: str
    session: str | None = None


class McpTools(Answer):
    version: str
    session: str | None
    tools: list[dict[str, Any]]
    left_out: list[str]


class McpResult(Answer):
    text: str
    is_error: bool


class McpApi:
    """Calls the servers that the settings allow, for several requests at once; clients take turns."""

    def __init__(self, settings: "ServerSettings") -> None:
        self._allowed = settings.mcp_servers
        self._lines = [Line() for _ in range(_NUM_CALLS)]
        self._slots = FairSlots("mcp", self._lines, max_queue=settings.max_queue)

    @property
    def about(self) -> dict[str, Any]:
        """What the page may name: URLs, and whether any of this machine."""
        return {"urls": [one for one in self._allowed if one != LOOPBACK], "loopback": LOOPBACK in self._allowed}

    def close(self) -> None:
        self._slots.close()
        for line in self._lines:
            line.interrupt()

    async def tools(self, request: McpServer) -> Response:
        """List the tools of an MCP server, and open a session with it."""

        def listed(line: Line) -> dict[str, Any]:
            tools = McpClient(request.url, line, time.monotonic() + _LIST_SECONDS).tools()
            session = tools.session
            return {"version": session.version, "session": session.id, "tools": tools.tools, "left_out": tools.left_out}

        return JSONResponse(await self._run(request.url, listed))

    async def call(self, request: McpCall) -> Response:
        """Call a tool of an MCP server."""

        def called(line: Line) -> dict[str, Any]:
            session = Session.of(request.version, request.session)
            client = McpClient(request.url, line, time.monotonic() + _CALL_SECONDS, session)
            result = client.call(request.name, request.arguments)
            return {"text": result.text, "is_error": result.is_error}

        return JSONResponse(await self._run(request.url, called))

    async def _run(self, url: str, work: Callable[[Line], _R]) -> _R:
        try:
            self._check(url)
            async with self._slots.slot() as slot:
                return await slot.run(work)
        except McpError as error:
            raise ApiError(_STATUS[error.code], str(error), code=error.code) from None

    def _check(self, url: str) -> None:
        """Raise McpError unless the option has the URL, or has this machine and the URL says so."""
        if url in self._allowed and url != LOOPBACK:
            return
        if not self._allowed:
            raise McpError("MCP servers are off: start the server with --mcp-server URL or loopback", "mcp_refused")
        if LOOPBACK not in self._allowed or not is_local(parse_url(url)):
            raise McpError(f"{url!r:.200} is not a server of --mcp-server", "mcp_refused")


def add_mcp(app: "FastAPI", api: McpApi, responses: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. responses: the errors of every route."""
    for path, function, answer in (
        ("/page/mcp/tools", api.tools, McpTools),
        ("/page/mcp/call", api.call, McpResult),
    ):
        app.add_api_route(path, function, methods=["POST"], responses={200: {"model": answer}, **responses})
