"""`whorl serve --on ray`: starts the replicas, then serves their endpoint in this process until SIGTERM or Ctrl-C.

SIGHUP replaces every replica by one that loads the model's files again.
"""

import functools
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.serve import openai
from whorl.serve.hosts import check_address

from .options import ClusterOptions
from .ray_cluster import RayCluster, need_ray
from .replica import replica_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI

    from whorl.serve.settings import ServerSettings

_LOG = logging.getLogger("whorl.serve")


def build_server(
    model: str | Path | None,
    engine: EngineSettings,
    options: ClusterOptions,
    *,
    drafting: DraftOptions | None = None,
    make: "Callable[[ServerSettings], FastAPI] | None" = None,
    **settings: Any,
) -> Callable[[], int]:
    """Check the options and return a function that serves replicas and returns the exit code.

    Arguments: as `openai.build_server`. make: builds the application of one replica; None: that of `model`. Raises
    ValueError for options that cannot be honoured.
    """
    need_ray()
    chosen = openai.settings_for(model, **settings)
    check_address(chosen.host, chosen.port)
    inner = replica_settings(chosen)
    load = make or functools.partial(openai.load_app, model, engine, drafting or DraftOptions())
    cluster = RayCluster(functools.partial(load, inner), engine=engine, options=options, settings=chosen)
    return lambda: _serve(cluster, chosen, options)


def _serve(cluster: RayCluster, settings: "ServerSettings", options: ClusterOptions) -> int:
    from whorl.serve.http_server import HttpServer
    from whorl.serve.request_log import begin_log

    from .endpoint import Endpoint

    begin_log(settings)
    _LOG.info("starting replicas of %s: %d", settings.names[0], options.start_with)
    try:
        cluster.start()
        endpoint: Any = Endpoint(cluster, settings, cluster.routing)
        server = HttpServer(endpoint, lifespan="off")
        server.listen()
        server.log_ready()
        with _replacing_on_hangup(cluster):
            server.run(sockets=server.listeners)
        return server.exit_code
    finally:
        cluster.stop()


@contextmanager
def _replacing_on_hangup(cluster: RayCluster) -> "Iterator[None]":
    """Replace the replicas on SIGHUP, one replacement at a time; a signal during one starts the next."""
    has_signal, is_over = threading.Event(), threading.Event()

    def work() -> None:
        while has_signal.wait() and not is_over.is_set():
            has_signal.clear()
            try:
                cluster.replace()
            except Exception:
                _LOG.exception("the replicas were not replaced")

    thread = threading.Thread(target=work, name="whorl-replace", daemon=True)
    thread.start()
    previous = signal.signal(signal.SIGHUP, lambda *_: has_signal.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)
        is_over.set()
        has_signal.set()
