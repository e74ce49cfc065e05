"""The HTTP server: uvicorn's, with a shutdown that answers every client and returns an exit code."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from .connections import Connections, listen

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG = logging.getLogger("whorl.serve")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SWEEP = 5  # how often idle connections are closed, in uvicorn's ticks of 0.1 seconds
_GRACE = 5  # seconds to write errors to requests whose time is up, before connections are aborted


class HttpServer(uvicorn.Server):
    """Serves the application of `create_app` until SIGINT or SIGTERM; `exit_code` then says how it ended."""

    def __init__(self, app: "FastAPI", **options: Any) -> None:
        self._service = app.state.service
        self._settings = settings = self._service.settings
        self.listeners: list[socket.socket] = []
        self.root = ""
        self._drain = settings.drain_seconds
        self.connections = Connections(most=settings.max_connections, head_seconds=settings.head_seconds)
        # The gate writes one line for each request, with its id; what uvicorn logs looks as everything else does.
        # No WebSockets: an upgraded connection would bypass every check of requests.
        options |= {"access_log": False, "log_config": None, "ws": "none"}
        options.setdefault("log_level", settings.log_level)
        options["timeout_graceful_shutdown"] = round(self._drain) + _GRACE
        super().__init__(uvicorn.Config(app, http=self.connections.protocol(), **options))

    @property
    def exit_code(self) -> int:
        """0: every request was answered in full; 1: some were cut off after `drain_seconds`; 130: Ctrl-C came twice."""
        return 130 if self.force_exit else int(self._service.running.num_ended > 0)

    def listen(self) -> None:
        """Listen on the address of the settings, with `listeners`; `root` is the address of the page."""
        host = self._settings.host
        self.listeners += listen(host, self._settings.port)
        # Kept, because Ctrl-C may close the sockets before the server says that it is ready.
        self.root = f"http://{f'[{host}]' if ':' in host else host}:{self.listeners[0].getsockname()[1]}"

    def log_ready(self) -> None:
        """Log where clients and readers find the server."""
        name, root = self._settings.names[0], self.root
        _LOG.info("ready: serving %s at %s/v1, with a page to talk to it at %s/", name, root, root)

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP == 0:
            self.connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        reason = f"the server is shutting down, and gave running requests {self._drain:g} seconds"
        timer = asyncio.get_running_loop().call_later(self._drain, self._service.running.end, reason)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM as uvicorn does, but do not raise them again after the shutdown.

        uvicorn raises the signal again, so the process would not exit with `exit_code`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
