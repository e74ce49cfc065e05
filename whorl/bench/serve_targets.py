"""Whom `whorl bench serve` sends its requests to: an engine in this process, or a server."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from whorl import device as devices
from whorl.bench import serve_client, serve_engine
from whorl.bench.provenance import Document, provenance
from whorl.bench.serve_options import LoadOptions
from whorl.bench.serve_record import Record, percentiles
from whorl.bench.workload import Load, Request, Workload
from whorl.engine.settings import EngineSettings

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

OnEnd = Callable[[], None]


class Target(Protocol):
    """Whom requests go to."""

    vocab_size: int

    def header(self) -> Document: ...

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: OnEnd
    ) -> tuple[list[Record], Document]:
        """What came of each request, and more fields of the row."""


def find_target(model: str | None, asked: LoadOptions, engine: EngineSettings, workload: Workload) -> Target:
    if asked.url is None:
        return InProcess(model, asked, engine, workload)
    serve_client.need_httpx()
    return OverHttp(model, asked)


class InProcess:
    def __init__(self, model: str | None, asked: LoadOptions, engine: EngineSettings, workload: Workload) -> None:
        self._name, self._is_random = asked.random_config or model or DEFAULT_MODEL, asked.random_config is not None
        self._ignore_eos = asked.ignore_eos
        self._llm = serve_engine.load_engine(model, asked.random_config, engine)
        self._ids = serve_engine.vocabulary(self._llm)
        self.vocab_size = len(self._ids)
        longest, limit = workload.longest, self._llm.max_model_len
        if longest > limit and (workload.trace or longest < 2**31):
            raise ValueError(
                f"bench serve: requests have up to {longest} tokens, prompt and answer together; sequences of this "
                f"engine have up to {limit}: ask for fewer, or say --max-seq or --cache-memory"
            )

    def header(self) -> Document:
        device = self._llm.settings.device or devices.default_device()
        weights = "random" if self._is_random else "loaded"
        about = {"target": "in process", "model": self._name, "weights": weights}
        return provenance(device) | about | {"engine": serve_engine.about(self._llm)}

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: OnEnd
    ) -> tuple[list[Record], Document]:
        before = self._llm.stats()
        records = serve_engine.EngineLoad(
            self._llm, self._ids, load, requests, seconds=seconds, ignore_eos=self._ignore_eos, on_end=on_end
        ).run()
        after = self._llm.stats()
        counts = {name: after[name] - before[name] for name in ("num_steps", "num_preemptions")}
        # A request is taken between steps; what it waits for one is in the queue's time.
        return records, {"send_late_ms": None, "loop_late_ms": None, **counts}


class OverHttp:
    def __init__(self, model: str | None, asked: LoadOptions) -> None:
        assert asked.url is not None
        self._server = asyncio.run(
            serve_client.find(
                serve_client.Server(
                    url=asked.url.rstrip("/").removesuffix("/v1"),
                    model=model or "",
                    api_key=asked.api_key,
                    is_chat=asked.chat,
                    ignore_eos=asked.ignore_eos,
                    more=_body(asked.body),
                    timeout=asked.timeout,
                )
            )
        )
        self.vocab_size = self._server.vocab_size

    def header(self) -> Document:
        server = self._server
        prompts = "token ids of common words" if server.vocabulary else "words: a token each, or nearly"
        about = {"target": f"{server.url}{server.path}", "model": server.model, "server_version": server.about}
        return provenance(devices.HOST) | about | {"prompts": prompts, "body": server.more}

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: OnEnd
    ) -> tuple[list[Record], Document]:
        records, more = asyncio.run(serve_client.measure(self._server, load, requests, seconds, on_end))
        late = {
            "send_late_ms": percentiles(record.sent - record.due for record in records),
            "loop_late_ms": percentiles(more["loop_late"]),
        }
        return records, late | {"queue_ms": more["queue"]}


def _body(text: str | None) -> Document:
    try:
        found: Any = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--body {text}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--body {text}: expected an object with names and values")
    return found
