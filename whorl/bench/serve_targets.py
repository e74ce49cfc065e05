"""The targets of `whorl bench serve`: an engine in this process, or a server."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from whorl import device as devices
from whorl.bench import serve_client, serve_engine
from whorl.bench.options import LoadOptions
from whorl.bench.provenance import Document, provenance
from whorl.bench.serve_record import Record, percentiles
from whorl.bench.workload import Load, Request, Workload
from whorl.engine.heap import keep_objects
from whorl.engine.settings import EngineSettings

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

OnEnd = Callable[[], None]


class Target(Protocol):
    """What requests are sent to. vocab_size: prompts are made of numbers below it."""

    vocab_size: int

    def header(self) -> Document:
        """Return the header of the document."""

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: OnEnd
    ) -> tuple[list[Record], Document]:
        """Run one load; returns a record for each request, and more fields of the row."""


def find_target(model: str | None, options: LoadOptions, engine: EngineSettings, workload: Workload) -> Target:
    """Load the engine or reach the server; raises ValueError when requests do not fit or nobody answers."""
    if options.url is None:
        return InProcess(model, options, engine, workload)
    serve_client.need_httpx()
    return OverHttp(model, options)


class InProcess:
    """An engine in this process."""

    def __init__(self, model: str | None, options: LoadOptions, engine: EngineSettings, workload: Workload) -> None:
        self._name, self._is_random = options.random_config or model or DEFAULT_MODEL, options.random_config is not None
        self._ignore_eos = options.ignore_eos
        self._llm = serve_engine.load_engine(model, options.random_config, engine)
        self._ids = serve_engine.vocabulary(self._llm)
        self.vocab_size = len(self._ids)
        longest, limit = workload.longest, self._llm.max_model_len
        if longest > limit and (workload.trace or longest < 2**31):
            raise ValueError(
                f"bench serve: requests have up to {longest} tokens, prompt and output together; sequences of this "
                f"engine have up to {limit}; give shorter --input and --output, or a larger --max-seq or --cache-memory"
            )

    def header(self) -> Document:
        device = self._llm.settings.device or devices.default_device()
        weights = "random" if self._is_random else "loaded"
        about = {"target": "in process", "model": self._name, "weights": weights}
        return provenance(device) | about | {"engine": serve_engine.about(self._llm)}

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: OnEnd
    ) -> tuple[list[Record], Document]:
        keep_objects()  # as a server does; the load's own requests are many more than a server's
        before = self._llm.stats()
        records = serve_engine.EngineLoad(
            self._llm, self._ids, load, requests, seconds=seconds, ignore_eos=self._ignore_eos, on_end=on_end
        ).run()
        after = self._llm.stats()
        counts = {name: after[name] - before[name] for name in ("num_steps", "num_preemptions")}
        # Requests are added between steps; the wait for a step counts as queue time, so none is sent late.
        return records, {"send_late_ms": None, "loop_late_ms": None, **counts}


class OverHttp:
    """A server with the OpenAI API."""

    def __init__(self, model: str | None, options: LoadOptions) -> None:
        assert options.url is not None
        self._server = asyncio.run(
            serve_client.find(
                serve_client.Server(
                    url=options.url.rstrip("/").removesuffix("/v1"),
                    model=model or "",
                    api_key=options.api_key,
                    is_chat=options.chat,
                    ignore_eos=options.ignore_eos,
                    more=_body(options.body),
                    timeout=options.timeout,
                )
            )
        )
        self.vocab_size = self._server.vocab_size

    def header(self) -> Document:
        server = self._server
        prompts = "token ids of common words" if server.vocabulary else "words of about one token each"
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
        fields: Any = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--body is {text}, expected JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--body is {text}, expected a JSON object")
    return fields
