"""Turns a validated request into token ids and sampling parameters for the engine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from whorl.engine.call_forms import CallReader
from whorl.engine.grammar_masks import only
from whorl.engine.harmony import is_harmony, last_ids
from whorl.engine.reply_parser import END_THINK, THINK
from whorl.engine.sequence import SamplingParams
from whorl.media import MediaItem, Placeholder
from whorl.media.families import FAMILIES

from .api_error import ApiError
from .grammar import Grammar, Grammars
from .media_intake import MediaIntake, media_parts
from .parsers import AUTO, choose_form, separates_thinking
from .schema_parts import MAX_IDS, ChatMessage, Part, TextPart, Tool, sampling_values
from .schemas import ChatRequest, CompletionRequest, Sampling
from .tools import call_grammar
from .worker_pool import Worker, WorkerPool

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

# Template variables that are fields of a request.
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The input of the engine for one request, and what the reply needs to know about the prompt."""

    prompts: list[list[int]]
    params: SamplingParams
    texts: list[str]  # the prompts as text, for echo
    may_think: bool = False  # the reply parser separates reasoning from content
    is_thinking: bool = False  # the prompt ends with an opening think tag
    form: type[CallReader] | None = None  # how the model writes tool calls; None: the request has no tools
    is_harmony: bool = False  # the model writes replies in harmony, `whorl.engine.harmony`
    media: Sequence[MediaItem] = ()  # pictures and videos; only a request with one prompt has any


class Preparer:
    """Prepares requests. Work that may take long runs in worker processes.

    prompts: the workers that render templates and tokenize. schemas: the workers that compile grammars. media: reads
    pictures and videos; None: the model takes text only.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        max_model_len: int,
        vocab_size: int,
        prompts: WorkerPool,
        schemas: WorkerPool,
        media: MediaIntake | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        self.tokenizer, self.max_model_len, self.vocab_size = tokenizer, max_model_len, vocab_size
        self._grammars = Grammars(tokenizer, vocab_size)
        self._prompts, self._schemas, self._media = prompts, schemas, media
        self._pads = (
            {} if media is None else {tokenizer.token_id(pad): pad for pad in FAMILIES[media.family].pads.values()}
        )
        self._form = choose_form(tool_parser, tokenizer)
        self._is_harmony = is_harmony(tokenizer)
        self._may_think = separates_thinking(reasoning_parser, tokenizer)
        # A grammar starts after the closing think tag, whether or not the reply separates the reasoning.
        self._has_think = tokenizer.token_id(END_THINK) is not None
        size = tokenizer.max_token_bytes
        # A longer text cannot fit into the context, so it is refused before it is tokenized.
        self._max_bytes = None if size is None else size * max_model_len

    async def chat(self, request: ChatRequest) -> Prepared:
        """Prepare a conversation: read its media, render the template, compile the grammar."""
        max_tokens = request.max_completion_tokens or request.max_tokens
        params = self._params(
            request, max_tokens=max_tokens, logprobs=request.num_top, prompt_logprobs=request.prompt_logprobs
        )
        if self._is_harmony:
            ends = (*params.stop_token_ids, *last_ids(self.tokenizer))
            params = replace(params, skip_special=False, stop_token_ids=ends)
            if request.forces_a_tool:
                raise ApiError(400, "tool_choice: calls in harmony have no grammar that could force one: use auto")
        items = await self.media(request.messages)
        longest = MAX_IDS if request.truncate_prompt_tokens is not None else None
        rendered = await self._render_request(request, items, max_tokens=longest)
        prompt, is_thinking = rendered["ids"], self._has_think and rendered["is_thinking"]
        if items and request.truncate_prompt_tokens is not None:
            problem = "a prompt with pictures or videos is not truncated: send fewer messages"
            raise ApiError(400, f"truncate_prompt_tokens: {problem}", param="truncate_prompt_tokens")
        prompt = self._truncated(prompt, request, max_tokens)
        self._check_length(prompt, max_tokens)
        allow = await self._compile_grammar(
            request,
            lambda worker: self._chat_grammar(request, worker),
            is_thinking=is_thinking,
            may_think=rendered["may_think"],
        )
        return Prepared(
            prompts=[prompt],
            params=replace(params, allow=allow),
            texts=[],
            may_think=self._may_think,
            is_thinking=is_thinking,
            form=self._form if request.uses_tools else None,
            is_harmony=self._is_harmony,
            media=items,
        )

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a conversation, even if that is more than the model's context."""
        items = await self.media(request.messages, max_tokens=MAX_IDS)
        return len((await self._render_request(request, items, max_tokens=MAX_IDS))["ids"])

    async def _render_request(
        self, request: ChatRequest, items: Sequence[MediaItem], max_tokens: int | None = None
    ) -> dict[str, Any]:
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort not in (None, "minimal"):
            variables.setdefault("enable_thinking", request.reasoning_effort != "none")
        tools = request.tools if request.uses_tools else None
        template_input = request.messages, tools, request.add_generation_prompt, variables, items
        continues, documents = request.continue_final_message, request.documents
        return await self.render(*template_input, max_tokens=max_tokens, documents=documents, continues=continues)

    async def media(self, messages: Sequence[ChatMessage], *, max_tokens: int | None = None) -> list[MediaItem]:
        """Read the pictures and videos of a conversation.

        max_tokens: how many tokens they may have in all; None: the model's context length. Raises ApiError 400 when
        the model takes text only.
        """
        if self._media is not None:
            return await self._media.read(messages, self.max_model_len if max_tokens is None else max_tokens)
        for where, _ in media_parts(messages):
            raise ApiError(400, f"{where}: this model takes text only", param=where, code="text_only")
        return []

    async def completion(self, request: CompletionRequest, messages: Sequence[ChatMessage] = ()) -> Prepared:
        """Prepare the prompts of a completion, which are texts or token ids. messages: with the pictures and videos for
        the placeholders of the one prompt."""
        params = self._params(
            request,
            max_tokens=None if request.max_tokens is None else max(request.max_tokens, 1),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs
            if request.echo and request.logprobs is not None
            else request.prompt_logprobs,
        )
        items = await self.media(messages)
        prompts, texts = await self._prompts.run(lambda worker: self._ids(request, worker, has_media=bool(items)))
        allow = await self._compile_grammar(
            request, lambda worker: self._format_grammar(request, worker), is_thinking=False, may_think=False
        )
        return Prepared(prompts=prompts, params=replace(params, allow=allow), texts=texts, media=items)

    def _ids(self, request: CompletionRequest, worker: Worker, *, has_media: bool) -> tuple[list[list[int]], list[str]]:
        """Return the ids of each prompt and, for echo, the text of each prompt."""
        inputs = _prompt_list(request.prompt)
        prompts: list[list[int]] = []
        texts: list[str] = []
        if isinstance(inputs[0], str):
            sizes = {"max_bytes": self._max_bytes, "max_tokens": self.max_model_len}
            if request.truncate_prompt_tokens is not None:
                sizes = {"max_bytes": None, "max_tokens": MAX_IDS}
            prompts = worker.ask("encode", texts=inputs, add_special=request.add_special_tokens, **sizes)
            is_whole = request.echo and request.truncate_prompt_tokens is None
            texts = list(inputs) if is_whole else []  # type: ignore[arg-type]
        else:
            prompts = [list(ids) for ids in inputs]  # type: ignore[arg-type]
        prompts = [self._truncated(ids, request, request.max_tokens) for ids in prompts]
        for ids in prompts:
            self._check_ids(ids, has_media=has_media)
            self._check_length(ids, request.max_tokens)
        if request.echo and not texts:
            texts = worker.ask("decode", lists=prompts)
        return prompts, texts

    async def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        media: Sequence[MediaItem] = (),
        *,
        max_tokens: int | None = None,
        documents: Sequence[dict[str, str]] | None = None,
        continues: bool = False,
    ) -> dict[str, Any]:
        """Render a conversation: `ids` are its tokens, `is_thinking` says if the model is to go on thinking.

        media: the pictures and videos of the messages, in their order. max_tokens: the limit on the rendered prompt;
        None: the model's context length. documents: for the template. continues: the answer continues the last message.
        """
        if bad := [name for name in _RESERVED if name in variables]:
            raise ApiError(400, f"chat_template_kwargs: {bad[0]} has a field of its own", param="chat_template_kwargs")

        if documents is not None:
            variables = {**variables, "documents": documents}
        if continues:
            variables = {**variables, "continue_final_message": True}
        size = None if self._media is None else self._media.merge_size
        places = None if size is None else [Placeholder.for_item(item, size).to_json() for item in media]
        family = None if self._media is None else self._media.family

        def work(worker: Worker) -> dict[str, Any]:
            return worker.ask(
                "render",
                messages=[_template_message(message) for message in messages],
                tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
                max_bytes=self._max_bytes if max_tokens is None else None,
                max_tokens=self.max_model_len if max_tokens is None else max_tokens,
                places=places,
                family=family,
            )

        rendered = await self._prompts.run(work)
        if continues:
            text = messages[-1].text() or ""
            rendered |= {"is_thinking": text.rfind(THINK) > text.rfind(END_THINK), "may_think": False}
        return rendered

    def _truncated(self, ids: list[int], request: Sampling, max_tokens: int | None) -> list[int]:
        """Return the end of a prompt, as long as `truncate_prompt_tokens` says."""
        most = request.truncate_prompt_tokens
        if most is None:
            return ids
        return ids[-(most if most > 0 else max(1, self.max_model_len - max(1, max_tokens or 1))) :]

    async def encode(self, text: str, *, add_special: bool, max_tokens: int) -> list[int]:
        sizes = {"max_bytes": None, "max_tokens": max_tokens}
        ids: list[list[int]] = await self._prompts.run(
            lambda worker: worker.ask("encode", texts=[text], add_special=add_special, **sizes)
        )
        return ids[0]

    async def decode(self, ids: Sequence[int]) -> str:
        texts: list[str] = await self._prompts.run(lambda worker: worker.ask("decode", lists=[ids]))
        return texts[0]

    def _params(self, request: Sampling, **fields: Any) -> SamplingParams:
        """Build the sampling parameters: the request's, else the model's recommended ones, else greedy.

        fields: further fields of `SamplingParams`.
        """
        sampling = self.tokenizer.sampling | sampling_values(request)
        if sampling.get("top_k") is not None:
            sampling["top_k"] = max(sampling["top_k"], 0)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(request, field) or ()
            if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
                raise ApiError(400, f"{field}: {bad[:4]} are outside the vocabulary of {self.vocab_size}", param=field)
        ends = {*self.tokenizer.eos_ids, *(request.stop_token_ids or ())}
        if request.min_tokens and request.allowed_token_ids is not None and ends.issuperset(request.allowed_token_ids):
            problem = "each of them ends the answer, which min_tokens excludes"
            raise ApiError(400, f"allowed_token_ids: {problem}", param="allowed_token_ids")
        return SamplingParams(
            **sampling,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            logit_bias=request.logit_bias or {},
            n=request.n or 1,
            stop=tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            include_stop=request.include_stop_str_in_output,
            drafts=request.drafts,
            skip_special=request.skip_special_tokens,
            on_update=request.on_update,
            **fields,
        )

    def _chat_grammar(self, request: ChatRequest, worker: Worker) -> Grammar:
        if request.forces_a_tool:
            assert request.tools is not None
            assert request.tool_choice is not None
            text = call_grammar(
                self._form,
                request.tools,
                request.tool_choice,
                is_parallel=request.parallel_tool_calls is not False,
                tokenizer=self.tokenizer,
            )
            return Grammar(text)
        return self._format_grammar(request, worker)

    def _format_grammar(self, request: ChatRequest | CompletionRequest, worker: Worker) -> Grammar:
        if request.constraint is not None:
            return self._grammars.constraint(request.constraint, worker)
        response_format = request.response_format
        assert response_format is not None
        schema = response_format.json_schema.schema_ if response_format.json_schema else None
        return self._grammars.json_schema({"type": "object"} if schema is None else schema)

    async def _compile_grammar(
        self, request: Sampling, make: Callable[[Worker], Grammar], *, is_thinking: bool, may_think: bool
    ) -> Any:
        """Return which tokens the answer may have, as a grammar or `allowed_token_ids` says; None: any.

        make: builds the grammar of a request that has one. is_thinking, may_think: as in `compiled`.
        """
        if request.allowed_token_ids is not None:
            return only(request.allowed_token_ids, self.vocab_size)
        if not request.has_grammar:
            return None
        for name in ("min_tokens", "ignore_eos"):
            if getattr(request, name):
                raise ApiError(400, f"{name} and a grammar exclude each other: the grammar says when the text ends")

        def compile_grammar(worker: Worker) -> Any:
            grammar = make(worker)
            self._grammars.prove(grammar, worker)
            return self._grammars.compile(grammar, is_thinking=is_thinking, may_think=may_think)

        return await self._schemas.run(compile_grammar)

    def _check_ids(self, ids: Sequence[int], *, has_media: bool) -> None:
        if bad := [i for i in ids if i >= self.vocab_size]:
            raise ApiError(
                400, f"prompt: ids {bad[:4]} are outside the vocabulary of {self.vocab_size}", param="prompt"
            )
        if not has_media and (pads := [self._pads[i] for i in ids if i in self._pads]):
            where = "pictures and videos are sent in messages, to /v1/chat/completions"
            raise ApiError(400, f"prompt: {pads[0]} stands for a picture or video, and there is none: {where}")

    def _check_length(self, ids: Sequence[int], max_tokens: int | None) -> None:
        num_new = max(1, max_tokens or 1)
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        if len(ids) + num_new > self.max_model_len:
            sizes = f"the prompt has {len(ids)} tokens and {num_new} more are asked for"
            limit = f"this model's maximum context length is {self.max_model_len} tokens"
            raise ApiError(400, f"{sizes}; {limit}. Shorten one of them.", code="context_length_exceeded")


def _prompt_list(prompt: str | Sequence[Any]) -> Sequence[str | Sequence[int]]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _content(parts: Sequence[Part]) -> str | list[dict[str, str]]:
    """Join the parts if all are text; templates of vision models take the parts one by one."""
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.type.removesuffix("_url")}
        for part in parts
    ]


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message: content becomes text or parts, the arguments of calls become objects.

    Raises ApiError 400 when the arguments are not JSON.
    """
    converted = message.model_dump(exclude_none=True, exclude={"content", "refusal"})
    content = message.content
    converted["content"] = _content(content) if isinstance(content, list) else content or ""
    for call in converted.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except json.JSONDecodeError:
                raise ApiError(400, f"messages: the arguments of {function['name']!r} are not JSON") from None
    return converted
