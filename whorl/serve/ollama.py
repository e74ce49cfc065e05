"""`/api`: Ollama's interface. A request becomes a chat request or a completion, and the reply lines of JSON."""

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from whorl import __version__
from whorl.engine.reply_parser import END_THINK, Parts

from .api_error import ApiError
from .conversation import image_part, text_part
from .dialects import dialect_for
from .embeddings import EmbeddingReply, EmbeddingRequest, EmbeddingsApi
from .engine_thread import StepOutput
from .ollama_schemas import (
    Call,
    GeneratingRequest,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    OllamaMessage,
    Options,
    ShowRequest,
)
from .replies import ParsedReply, Run, arguments_of
from .schema_parts import SAMPLING
from .schemas import ChatRequest, CompletionRequest
from .validation import validated

if TYPE_CHECKING:
    from .service import Service

# The version of Ollama whose interface this is: programs ask for it before they send tools or thinking.
OLLAMA_VERSION = "0.12.6"
_TAG = ":latest"  # what Ollama's clients add to a name without a tag
_ALWAYS = "0001-01-01T00:00:00Z"  # Go's time zero, Ollama's "never" for the end of a model that stays
_EFFORTS = {True: "medium", False: "none", "max": "xhigh"}


class OllamaApi:
    """The handlers of `/api`. embeddings: the API that makes them."""

    def __init__(self, service: "Service", embeddings: EmbeddingsApi) -> None:
        self._service, self._embeddings = service, embeddings
        self._started = _now()

    # ---- generating

    async def chat(self, request: OllamaChat, http: Request) -> Response:
        """Reply to a conversation; without messages, say that the model is loaded."""
        name = self._name(request.model)
        if not request.messages:
            empty = {"message": {"role": "assistant", "content": ""}}
            return self._loaded(name, request, empty, http)
        chat = chat_request(request, [_chat_message(message) for message in request.messages], name)
        return await self._reply(chat, http, lambda run: OllamaReply(chat, run, _as_message))

    async def generate(self, request: OllamaGenerate, http: Request) -> Response:
        """Answer a prompt, in the model's template unless it is raw; without one, say that the model is loaded."""
        name = self._name(request.model)
        if not request.prompt and not request.images:
            return self._loaded(name, request, {"response": ""}, http)
        if request.raw and (request.system or request.images):
            raise ApiError(400, "raw: the prompt is all: leave out system and images, or send the request without raw")
        message = OllamaMessage(role="user", content=request.prompt, images=request.images)
        system = [{"role": "system", "content": request.system}] if request.system else []
        chat = chat_request(request, [*system, _chat_message(message)], name)
        if not request.raw:
            return await self._reply(chat, http, lambda run: OllamaReply(chat, run, _as_response))
        fields = _shared_fields(request, name) | {"prompt": request.prompt, "logprobs": chat.num_top}
        # None, which `validated` leaves out, means as many as fit; left out they are 16.
        completion = validated(CompletionRequest, fields).model_copy(update={"max_tokens": chat.max_tokens})
        prepare = self._service.preparer.completion
        return await self._service.generate(completion, http, prepare, lambda run: OllamaReply(chat, run, _as_response))

    async def _reply(self, chat: ChatRequest, http: Request, reply: Any) -> Response:
        return await self._service.generate(chat, http, self._service.preparer.chat, reply)

    def _loaded(self, name: str | None, request: GeneratingRequest, fields: dict[str, Any], http: Request) -> Response:
        """Return the answer to a request that only loads or unloads the model, which stays as it is."""
        reason = "unload" if request.keep_alive in (0, "0") else "load"
        model = self._service.model_name(name)
        line = {"model": model, "created_at": _now(), **fields, "done": True, "done_reason": reason}
        if not request.streams:
            return JSONResponse(line)
        dialect = dialect_for(http.url.path)
        return StreamingResponse(iter([dialect.event(line)]), media_type=dialect.media_type)

    # ---- embeddings

    async def embed(self, request: OllamaEmbed, http: Request) -> Response:
        """Return a vector for each text."""
        return await self._embed(request.model, request, http, OllamaVectors)

    async def embedding(self, request: OllamaEmbedding, http: Request) -> Response:
        """Return the vector of one text, as older clients ask for it."""
        fields = OllamaEmbed.model_validate({"model": request.model, "input": request.prompt})
        return await self._embed(request.model, fields, http, OllamaVector)

    async def _embed(self, model: str, request: OllamaEmbed, http: Request, reply: type[EmbeddingReply]) -> Response:
        body = {"input": request.input, "model": self._name(model), "dimensions": request.dimensions}
        body["truncate_prompt_tokens"] = -1 if request.truncate else None
        return await self._embeddings.embed(validated(EmbeddingRequest, body), http, reply)

    # ---- what is served

    async def tags(self) -> dict[str, Any]:
        """List the model under each of its names, and its adapters."""
        return {"models": [self._card(name) for name in self._names]}

    async def running(self) -> dict[str, Any]:
        """List the model that is loaded: the one that is served."""
        loaded = {"expires_at": _ALWAYS, "size_vram": self._size, "context_length": self._service.llm.max_model_len}
        return {"models": [self._card(self._names[0]) | loaded]}

    async def show(self, request: ShowRequest) -> dict[str, Any]:
        """Describe one model: its template, its recommended sampling and its abilities."""
        name = self._name(request.model or request.name)
        service, tokenizer = self._service, self._service.tokenizer
        card = await service.model(service.model_name(name))
        kind = self._details["family"]
        capabilities = ["embedding"] if service.settings.pooling is not None else ["completion"]
        template = tokenizer.template.sources.get("default") or ""
        capabilities += ["tools"] if "tools" in template else []
        capabilities += ["vision"] if service.takes_media else []
        capabilities += ["thinking"] if tokenizer.token_id(END_THINK) is not None else []
        return {
            "modelfile": f"# served by whorl {__version__}\nFROM {card['root']}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in tokenizer.sampling.items()),
            "template": template,
            "details": self._details,
            "model_info": {"general.architecture": kind, f"{kind}.context_length": service.llm.max_model_len},
            "capabilities": capabilities,
            "modified_at": self._started,
        }

    async def version(self) -> dict[str, str]:
        """Return the version of Ollama whose interface this is, and the server's own."""
        return {"version": OLLAMA_VERSION, "whorl": __version__}

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._service.settings.names, *self._service.llm.adapters.by_name)

    def _name(self, name: str | None) -> str | None:
        """Return the name without the tag that Ollama's clients add."""
        is_tagged = name is not None and name not in self._names and name.endswith(_TAG)
        return name.removesuffix(_TAG) if name is not None and is_tagged else name

    def _card(self, name: str) -> dict[str, Any]:
        digest = hashlib.sha256(f"{name} {self._started}".encode()).hexdigest()
        fields = {"name": name, "model": name, "modified_at": self._started, "size": self._size, "digest": digest}
        return fields | {"details": self._details}

    @property
    def _size(self) -> int:
        parameters = getattr(self._service.llm.model, "parameters", None)
        return 0 if parameters is None else sum(parameter.nbytes for parameter in parameters())

    @property
    def _details(self) -> dict[str, Any]:
        config = getattr(self._service.llm.model, "config", None)
        family = str(getattr(config, "model_type", None) or type(self._service.llm.model).__name__.lower())
        file = "gguf" if self._service.settings.names[0].lower().endswith("gguf") else "safetensors"
        fields = {"parent_model": "", "format": file, "family": family, "families": [family]}
        return fields | {"parameter_size": "", "quantization_level": self._service.llm.settings.quantize or ""}


# ---- the request


def chat_request(request: GeneratingRequest, messages: list[dict[str, Any]], name: str | None) -> ChatRequest:
    """Translate a request to the chat request that means the same; raise ApiError 400 where that is not possible."""
    fields = _shared_fields(request, name) | {"messages": messages}
    if isinstance(request, OllamaChat):
        fields["tools"] = request.tools
        # A last message of the assistant is the beginning of the answer.
        fields["continue_final_message"] = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if request.think is not None:
        fields["reasoning_effort"] = _EFFORTS.get(request.think, request.think)
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return validated(ChatRequest, fields)


def _shared_fields(request: GeneratingRequest, name: str | None) -> dict[str, Any]:
    """Return the fields that chat requests and completions have in common."""
    options = request.options or Options.model_validate({})
    fields: dict[str, Any] = {field: getattr(options, field) for field in SAMPLING}
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    longest = options.num_predict or None
    fields |= {"model": name, "stream": request.streams, "stop": options.stop}
    fields["max_tokens"] = None if longest is None or longest < 0 else longest
    fields["truncate_prompt_tokens"] = -1 if request.truncate else None
    if isinstance(request.format, dict):
        schema = {"name": "answer", "schema": request.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.format:
        fields["response_format"] = {"type": "json_object"}
    return fields


def _chat_message(message: OllamaMessage) -> dict[str, Any]:
    """Return a message as `ChatRequest` takes it. Ollama sends pictures as base64 without their kind."""
    content: Any = message.content
    if message.images:
        urls = [image if image.startswith("data:") else f"data:image/png;base64,{image}" for image in message.images]
        content = [*map(image_part, urls), *([text_part(content)] if content else [])]
    fields: dict[str, Any] = {"role": message.role, "content": content, "reasoning_content": message.thinking}
    fields |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    if message.tool_calls:
        fields["tool_calls"] = [_chat_call(call) for call in message.tool_calls]
    return {name: value for name, value in fields.items() if value is not None}


def _chat_call(call: Call) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


# ---- the reply


def _as_message(content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    more = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
    return {"message": {"role": "assistant", "content": content, **more}}


def _as_response(content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": content} | ({"thinking": thinking} if thinking else {})


class OllamaReply(ParsedReply):
    """Formats a reply as Ollama's lines. A call is sent whole, when the answer ends. shape: fields of one line."""

    def __init__(self, request: ChatRequest, run: Run, shape: Any) -> None:
        super().__init__(request, run)
        self._model, self._shape, self._calls, self._reason = run.model, shape, Parts(), ""

    async def complete(self, deadline: float) -> dict[str, Any]:
        whole, logprobs = Parts(), []
        async for output in self.job.outputs(deadline):
            parts = self._add(output)
            whole.content += parts.content
            whole.reasoning += parts.reasoning
            logprobs += self._logprobs_of().get("logprobs", [])
        line = self._line(self._shape(whole.content, whole.reasoning, self._whole_calls()))
        return line | ({"logprobs": logprobs} if logprobs else {}) | self._end()

    async def chunks(self, deadline: float) -> AsyncIterator[dict[str, Any]]:
        async for output in self.job.outputs(deadline):
            parts = self._add(output)
            if parts.reasoning:
                yield self._line(self._shape("", parts.reasoning, [])) | {"done": False}
            if parts.content:
                yield self._line(self._shape(parts.content, "", [])) | {"done": False} | self._logprobs_of()
        for call in self._whole_calls():
            yield self._line(self._shape("", "", [call])) | {"done": False}
        yield self._line(self._shape("", "", [])) | self._logprobs_of() | self._end()

    def _add(self, output: StepOutput) -> Parts:
        parts = self.parse(output)
        self._calls.calls += parts.calls
        if output.finish_reason is not None:
            self._reason = str(output.finish_reason)
        return parts

    def _whole_calls(self) -> list[dict[str, Any]]:
        calls = [(c.id, {"name": c.name, "arguments": arguments_of(c.arguments)}) for c in self._calls.whole_calls()]
        return [{"id": call_id, "function": {"index": at} | call} for at, (call_id, call) in enumerate(calls)]

    def _logprobs_of(self) -> dict[str, Any]:
        logprobs = self.take_logprobs(0)
        return {} if logprobs is None else {"logprobs": logprobs["content"]}

    def _line(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": _now(), **fields}

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last line: why it ended, and the times, in nanoseconds."""
        (seq,) = self.job.sequences
        times = seq.timings
        first = times.first_token or times.added
        end = times.finished or first
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(end - times.added),
            "load_duration": 0,
            "prompt_eval_count": seq.prompt_len,
            "prompt_eval_duration": _nanoseconds(first - times.added),
            "eval_count": seq.num_outputs,
            "eval_duration": _nanoseconds(end - first),
        }


class OllamaVectors(EmbeddingReply):
    async def complete(self, deadline: float) -> dict[str, Any]:
        answer = await super().complete(deadline)
        vectors = [entry["embedding"] for entry in answer["data"]]
        return self.shaped(vectors, answer)

    def shaped(self, vectors: list[Any], answer: dict[str, Any]) -> dict[str, Any]:
        seconds = max((seq.timings.finished or 0) - seq.timings.added for seq in self.job.sequences)
        counts = {"prompt_eval_count": answer["usage"]["prompt_tokens"], "load_duration": 0}
        times = {"total_duration": _nanoseconds(max(0.0, seconds))}
        return {"model": answer["model"], "embeddings": vectors, **times, **counts}


class OllamaVector(OllamaVectors):
    def shaped(self, vectors: list[Any], answer: dict[str, Any]) -> dict[str, Any]:
        return {"embedding": vectors[0]}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
