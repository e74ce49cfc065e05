"""The handlers of the server's routes. `routes.add_routes` says which route each handler serves."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from whorl import __version__
from whorl.engine.reply_parser import END_THINK
from whorl.engine.warmup import Kind, WarmUp, kind_for, shown

from .api_error import ApiError
from .dialects import REQUEST_ID, dialect_for, last_event
from .engine_thread import EngineThread
from .gate import KEY_INDEX, STEERING
from .key_limits import KeyUse
from .logprobs import DetailWriter, TokenTexts
from .mcp import McpApi
from .media_intake import MediaIntake
from .metrics import Metrics
from .prepare import Prepared, Preparer
from .readiness import Readiness, WarmingUp
from .replies import ChatReply, CompletionReply, Reply, Run
from .running import CURRENT_CLIENT, Running
from .schema_parts import MAX_IDS
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeRequest
from .settings import ServerSettings
from .worker_pool import WorkerPool

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.engine.tokenizer import Tokenizer
    from whorl.media import Processor

_LOG = logging.getLogger("whorl.serve")
_R = TypeVar("_R", bound=Sampling)
# Proxies must neither cache an answer nor buffer it before passing it on.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Service:
    """Serves one model over HTTP.

    processor: reads the pictures of a vision model and is closed with the service; None: the model takes text only.
    """

    def __init__(self, llm: "LLM", settings: ServerSettings, processor: "Processor | None" = None) -> None:
        tokenizer: Any = llm.tokenizer  # the engine's type has fewer methods than the server uses
        if tokenizer is None:
            raise ValueError("serve: the model has no tokenizer")
        self._llm = self.llm = llm
        self.settings = settings
        if names := set(llm.adapters.by_name) & set(settings.names):
            raise ValueError(f"serve: {', '.join(names)} names the model and an adapter; give one another name")
        if settings.chat_template is not None:
            tokenizer = tokenizer.with_template(settings.chat_template)
        if sampling := settings.sampling():
            tokenizer = tokenizer.with_sampling(sampling)
        self.tokenizer: Tokenizer = tokenizer
        self.metrics = Metrics(settings.names[0], llm.stats)
        self.warmup: Kind = "off" if llm.warmed else kind_for(llm.settings.warmup, llm.runner.device, is_server=True)
        steps = WarmUp(llm, self.warmup).run()
        readiness = Readiness(steps if self.warmup == "off" else shown(steps))
        self.engine = EngineThread(llm, self.metrics, max_queue=settings.max_queue, readiness=readiness)
        self.running = Running()
        self.uses = [KeyUse(key) for key in settings.all_keys]
        state = {"tokenizer": self.tokenizer.state(), "vocab_size": llm.vocab_size, "memory": settings.job_memory}
        self._prompts = WorkerPool("prompt", state | {"seconds": settings.job_seconds}, max_queue=settings.max_queue)
        # A grammar is compiled again in this process, so its worker gets half the time and a quarter of the memory.
        reduced = {"seconds": settings.job_seconds / 2, "memory": settings.job_memory // 4}
        self._schemas = WorkerPool("schema", state | reduced, max_queue=settings.max_queue)
        self._media = None if processor is None else MediaIntake(processor, settings)
        self._preparer = Preparer(
            tokenizer,
            max_model_len=llm.max_model_len,
            vocab_size=llm.vocab_size,
            prompts=self._prompts,
            schemas=self._schemas,
            media=self._media,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        self.mcp = McpApi(settings)
        self._texts = TokenTexts(tokenizer)
        self.drafted_by = None if llm.proposer is None else llm.proposer.source
        self._created = int(time.time())

    @property
    def preparer(self) -> Preparer:
        return self._preparer

    @property
    def takes_media(self) -> bool:
        return self._media is not None

    async def start(self) -> None:
        await self._prompts.start()
        self.engine.start()

    async def stop(self) -> None:
        self._prompts.close()
        self._schemas.close()
        if self._media is not None:
            self._media.close()
        self.mcp.close()
        await self.engine.stop()

    # ---- generating

    async def chat_completions(self, request: ChatRequest, http: Request) -> Response:
        """Reply to a conversation."""
        options = request.token_details
        details = None if options is None else DetailWriter(options, self._texts, self.tokenizer, self.drafted_by)
        return await self.generate(request, http, self._preparer.chat, lambda run: ChatReply(request, run, details))

    async def completions(self, request: CompletionRequest, http: Request) -> Response:
        """Continue a text or token ids; one prompt or several."""
        return await self.generate(request, http, self._preparer.completion, lambda run: CompletionReply(request, run))

    async def generate(
        self, request: _R, http: Request, prepare: Callable[[_R], Awaitable[Prepared]], reply: Callable[[Run], Reply]
    ) -> Response:
        """Generate for a request and return one JSON object or an event stream, as `request.stream` says.

        prepare: turns the request into prompts and sampling parameters. reply: builds the object that formats the
        answer. Raises ApiError and the errors of `EngineThread.submit`.
        """
        model = self.model_name(request.model)
        self.engine.check()
        self.engine.check_size((request.n or 1) * request.num_prompts)
        self._check_logprobs(request)
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        async with asyncio.timeout_at(deadline):
            prepared = await prepare(request)
            salt, client = self._salt(request, http), CURRENT_CLIENT.get()
            lora = model if model in self.llm.adapters.by_name else None
            params = replace(prepared.params, cache_salt=salt, client=client, priority=request.priority, lora=lora)
            media = [prepared.media] if prepared.media else None
            job = await self.engine.submit(prepared.prompts, [params] * len(prepared.prompts), media)

        def close() -> None:
            self.engine.close(job)
            if self.uses and (key := http.scope.get(KEY_INDEX)) is not None:
                self.uses[key].charge(sum(len(seq.token_ids) for seq in job.sequences))

        run = Run(
            prepared=replace(prepared, media=()),
            job=job,
            model=model,
            request_id=http.scope[REQUEST_ID],
            texts=self._texts,
            end_think=self.tokenizer.token_id(END_THINK),
            has_versions=self.settings.rl,
        )
        formatter = reply(run)
        if request.stream:
            return EventStream(formatter.chunks(deadline), http.scope, close=close)

        try:
            return JSONResponse(await formatter.complete(deadline))
        finally:
            close()

    def _check_logprobs(self, request: Sampling) -> None:
        most = self.settings.max_logprobs
        for name, count in (("logprobs", request.num_top), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and 0 <= most < count:
                message = f"{name}: {count} alternatives are asked for, and this server reports up to {most}"
                raise ApiError(400, f"{message}: --max-logprobs", param=name)

    def _salt(self, request: Sampling, http: Request) -> str | None:
        """Return the salt of the prefix cache: requests share it only with the same API key and the same salt."""
        if len(self.settings.keys) < 2 and request.cache_salt is None:
            return None
        return f"{http.scope.get(KEY_INDEX)} {request.cache_salt or ''}"

    def model_name(self, name: str | None) -> str:
        """Return the name by which the answer calls the model, for the name in a request: the model's or an adapter's.

        One model is served, so it answers to a name that is not its own as well; with `strict_model_name` that raises
        ApiError 404.
        """
        names = self.settings.names
        if name is None or name in names or name in self.llm.adapters.by_name:
            return name or names[0]
        if self.settings.strict_model_name:
            raise self._unknown_model(name)
        _LOG.warning("a request for the model %.100r: %s answers it; --strict-model-name refuses it", name, names[0])
        return names[0]

    def _unknown_model(self, name: str) -> ApiError:
        served = (*self.settings.names, *self.llm.adapters.by_name)
        message = f"the model {name!r} is not served here. Served: {', '.join(served)}"
        return ApiError(404, message, param="model", code="model_not_found")

    # ---- tokens

    async def tokenize(self, request: TokenizeRequest) -> Response:
        """Return the token ids of a text or of a conversation."""
        self.model_name(request.model)
        if request.messages is None:
            assert request.prompt is not None
            special = request.add_special_tokens
            ids = await self._preparer.encode(request.prompt, add_special=special, max_tokens=MAX_IDS)
        else:
            variables = dict(request.chat_template_kwargs or {})
            items = await self._preparer.media(request.messages, max_tokens=MAX_IDS)
            template_input = request.messages, request.tools, request.add_generation_prompt, variables, items
            continues = request.continue_final_message
            ids = (await self._preparer.render(*template_input, max_tokens=MAX_IDS, continues=continues))["ids"]
        body = {"count": len(ids), "max_model_len": self._preparer.max_model_len, "tokens": ids}
        if request.return_token_strs:
            body["token_strs"] = [self._texts.name(i) for i in ids]
        return JSONResponse(body)  # FastAPI would validate a plain dict id by id, which takes seconds

    async def detokenize(self, request: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        self.model_name(request.model)
        return JSONResponse({"prompt": await self._preparer.decode(request.tokens)})

    async def tokenizer_info(self) -> dict[str, Any]:
        """Describe the tokenizer, so that a client can tokenize as this model does."""
        eos_id, bos_id = next(iter(self.tokenizer.eos_ids), None), self.tokenizer.bos_id
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "eos_token": None if eos_id is None else self.tokenizer.token(eos_id),
            "bos_token": None if bos_id is None else self.tokenizer.token(bos_id),
            "pad_token": None,
            "chat_template": self.tokenizer.template.sources.get("default"),
            "model_max_length": self._preparer.max_model_len,
        }

    # ---- the server itself

    async def models(self) -> dict[str, Any]:
        """List the model under each of its names, and its adapters."""
        names = (*self.settings.names, *self.llm.adapters.by_name)
        return {"object": "list", "data": [self._card(name) for name in names]}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe one model."""
        if name not in self.settings.names and name not in self.llm.adapters.by_name:
            raise self._unknown_model(name)
        return self._card(name)

    def _card(self, name: str) -> dict[str, Any]:
        base = self.settings.names[0]
        fields = {"id": name, "object": "model", "created": self._created, "owned_by": "whorl", "root": base}
        fields |= {"max_model_len": self._preparer.max_model_len}
        return fields | ({"parent": base} if name in self.llm.adapters.by_name else {})

    async def health(self) -> Response:
        """Return 200 while the engine serves; 503 with the progress of the warm-up before that."""
        try:
            self.engine.check()
        except WarmingUp as error:
            api_error, progress = ApiError.from_exception(error), error.progress
            done, total = (progress.done, progress.total) if progress else (0, None)
            body = {"status": "warming_up", "done": done, "total": total} | api_error.body()
            return JSONResponse(body, api_error.status, headers=dict(api_error.headers or {}))
        if (problem := self.llm.problem) is not None:
            raise ApiError(503, problem, code="engine_stalled")
        seconds = self.engine.stalled_for()
        if seconds > self.settings.stall_seconds:
            raise ApiError(503, f"the engine's step has run for {seconds:.0f} seconds", code="engine_stalled")
        return JSONResponse({"status": "ok"})

    async def prometheus(self) -> Response:
        """Return the metrics in Prometheus's text format."""
        text, kind = self.metrics.render()
        return Response(text, media_type=kind)

    async def version(self) -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}


class EventStream(StreamingResponse):
    """Sends chunks as events, in the dialect of the route.

    `close` runs when the stream is over, however it ends.
    """

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], scope: Scope, close: Callable[[], None]) -> None:
        media_type = dialect_for(scope["path"]).media_type
        super().__init__(_events(chunks, scope), media_type=media_type, headers=_STREAM_HEADERS)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(chunks: AsyncIterator[dict[str, Any]], scope: Scope) -> AsyncIterator[str]:
    """Yield the text of each event, then the end of the stream or an event with the error."""
    dialect = dialect_for(scope["path"])
    try:
        async for chunk in chunks:
            yield dialect.event(chunk)
    except STEERING:
        raise
    except BaseException as error:  # status 200 has been sent already, so the error is an event
        yield last_event(ApiError.from_exception(error), scope)
    else:
        yield dialect.done
