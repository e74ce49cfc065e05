"""What the server does for each address. `openai.create_app` says which address that is."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from whorl import __version__
from whorl.engine.reply_parser import END_THINK
from whorl.engine.warmup import Kind, WarmUp, kind_for, shown

from .dialects import REQUEST_NUMBER
from .engine_thread import EngineThread
from .gate import KEY_NUMBER, ApiError
from .key_limits import KeyUse
from .logprobs import TokenTexts
from .media_intake import MediaIntake
from .metrics import Metrics
from .prepare import Prepared, Preparer
from .readiness import Readiness, WarmingUp
from .replies import ChatReply, CompletionReply, Reply, Run
from .running import Running
from .schema_parts import MAX_IDS
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeRequest
from .settings import ServerSettings
from .stream import EventStream, unless_gone
from .token_details import DetailWriter
from .worker_pool import WorkerPool

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.engine.tokenizer import Tokenizer
    from whorl.media import Processor

_R = TypeVar("_R", bound=Sampling)


class Service:
    """One model, asked over HTTP. processor: of its pictures, closed with the service; None: it takes none."""

    def __init__(self, llm: "LLM", settings: ServerSettings, processor: "Processor | None" = None) -> None:
        tokenizer: Any = llm.tokenizer  # the engine asks less of it than the server
        if tokenizer is None:
            raise ValueError("serve: the model has no tokenizer")
        self.settings = settings
        if settings.chat_template is not None:
            tokenizer = tokenizer.with_template(settings.chat_template)
        self.tokenizer: Tokenizer = tokenizer
        self.metrics = Metrics(settings.names[0], llm.stats)
        self.warmup: Kind = "off" if llm.warmed else kind_for(llm.settings.warmup, llm.runner.device, is_server=True)
        steps = WarmUp(llm, self.warmup).run()
        readiness = Readiness(steps if self.warmup == "off" else shown(steps))
        self.engine = EngineThread(llm, self.metrics, max_queue=settings.max_queue, readiness=readiness)
        self.running = Running()
        self.uses = [KeyUse(key) for key in settings.who]
        state = {"tokenizer": self.tokenizer.state(), "vocab_size": llm.vocab_size, "memory": settings.job_memory}
        self._prompts = WorkerPool("prompt", state | {"seconds": settings.job_seconds}, max_queue=settings.max_queue)
        half = {"seconds": settings.job_seconds / 2, "memory": settings.job_memory // 4}  # done again in this process
        self._schemas = WorkerPool("schema", state | half, max_queue=settings.max_queue)
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
        self._texts = TokenTexts(tokenizer)
        self.drafted_by = None if llm.proposer is None else llm.proposer.source
        self._created = int(time.time())

    @property
    def preparer(self) -> Preparer:
        return self._preparer

    async def start(self) -> None:
        await self._prompts.start()
        self.engine.start()

    async def stop(self) -> None:
        self._prompts.close()
        self._schemas.close()
        if self._media is not None:
            self._media.close()
        await self.engine.stop()

    # ---- generating

    async def chat_completions(self, request: ChatRequest, http: Request) -> Response:
        """A reply to a conversation."""
        asked = request.token_details
        details = None if asked is None else DetailWriter(asked, self._texts, self.tokenizer, self.drafted_by)
        return await self.generate(request, http, self._preparer.chat, lambda run: ChatReply(request, run, details))

    async def completions(self, request: CompletionRequest, http: Request) -> Response:
        """What comes after a text or after token ids; one prompt or several."""
        return await self.generate(request, http, self._preparer.completion, lambda run: CompletionReply(request, run))

    async def generate(
        self, request: _R, http: Request, prepare: Callable[[_R], Awaitable[Prepared]], reply: Callable[[Run], Reply]
    ) -> Response:
        """The answer to a request, whole or as a stream, in whatever shape `reply` gives it."""
        model = self.model_name(request.model)
        self.engine.check()
        self.engine.check_size((request.n or 1) * request.num_prompts)
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        async with asyncio.timeout_at(deadline):
            prepared = await prepare(request)
            params = replace(prepared.params, cache_salt=self._salt(request, http))
            media = [prepared.media] if prepared.media else None
            job = await self.engine.submit(prepared.prompts, [params] * len(prepared.prompts), media)

        def close() -> None:
            self.engine.close(job)
            if self.uses and (key := http.scope.get(KEY_NUMBER)) is not None:
                self.uses[key].charge(sum(len(seq.token_ids) for seq in job.sequences))

        run = Run(
            prepared=replace(prepared, media=()),
            job=job,
            model=model,
            number=http.scope[REQUEST_NUMBER],
            texts=self._texts,
            end_think=self.tokenizer.token_id(END_THINK),
        )
        made = reply(run)
        if request.stream:
            return EventStream(made.chunks(deadline), http.scope, close=close)

        async def whole() -> Response:
            return JSONResponse(await made.whole(deadline))

        try:
            return await unless_gone(http, whole())
        finally:
            close()

    def _salt(self, request: Sampling, http: Request) -> str | None:
        """Whose cache a request may find its prompt in: each key has its own, and in it each salt."""
        if len(self.settings.keys) < 2 and request.cache_salt is None:
            return None
        return f"{http.scope.get(KEY_NUMBER)} {request.cache_salt or ''}"

    def model_name(self, asked: str | None) -> str:
        """The name that the client used."""
        names = self.settings.names
        if asked is not None and asked not in names:
            has = ", ".join(names)
            raise ApiError(404, f"the model {asked!r} is not here. Has: {has}", param="model", code="model_not_found")
        return asked or names[0]

    # ---- tokens

    async def tokenize(self, request: TokenizeRequest) -> Response:
        """The ids of a text or of a conversation."""
        self.model_name(request.model)
        if request.messages is None:
            assert request.prompt is not None
            special = request.add_special_tokens
            ids = await self._preparer.encode(request.prompt, add_special=special, max_tokens=MAX_IDS)
        else:
            variables = dict(request.chat_template_kwargs or {})
            items = await self._preparer.media(request.messages, max_tokens=MAX_IDS)
            given = request.messages, request.tools, request.add_generation_prompt, variables, items
            ids = (await self._preparer.render(*given, max_tokens=MAX_IDS))["ids"]
        found = {"count": len(ids), "max_model_len": self._preparer.max_model_len, "tokens": ids}
        if request.return_token_strs:
            found["token_strs"] = [self._texts.name(i) for i in ids]
        return JSONResponse(found)  # as it is: FastAPI would look at each id by itself, for seconds

    async def detokenize(self, request: DetokenizeRequest) -> Response:
        """The text of ids."""
        self.model_name(request.model)
        return JSONResponse({"prompt": await self._preparer.decode(request.tokens)})

    async def tokenizer_info(self) -> dict[str, Any]:
        """What a client needs to know to cut texts as this model does."""
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
        """The model, by each of its names."""
        return {"object": "list", "data": [self._card(name) for name in self.settings.names]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model."""
        return self._card(self.model_name(name))

    def _card(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "whorl"}
        return about | {"root": self.settings.names[0], "max_model_len": self._preparer.max_model_len}

    async def health(self) -> Response:
        """200 while the engine answers; before it does, 503 with how far its warm-up is."""
        try:
            self.engine.check()
        except WarmingUp as error:
            refused, at = ApiError.of(error), error.progress
            body = {"status": "warming_up", "done": at.done if at else 0, "total": at.total if at else None}
            return JSONResponse(body | refused.body(), refused.status, headers=dict(refused.headers or {}))
        seconds = self.engine.stalled_for()
        if seconds > self.settings.stall_seconds:
            raise ApiError(503, f"the engine's step has run for {seconds:.0f} seconds", code="engine_stalled")
        for pool in (self._prompts, self._schemas):
            if (what := pool.stuck(self.settings.stall_seconds)) is not None:
                raise ApiError(503, what, code="workers_stalled")
        return JSONResponse({"status": "ok"})

    async def prometheus(self) -> Response:
        """Counters in Prometheus's text format."""
        text, kind = self.metrics.render()
        return Response(text, media_type=kind)

    async def version(self) -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}
