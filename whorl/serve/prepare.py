"""From a request to prompts and sampling parameters. Runs beside the event loop: long texts take a while to encode."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whorl.engine.sequence import SamplingParams

from .gate import ApiError
from .grammar import Grammars
from .schemas import ChatMessage, ChatRequest, CompletionRequest, ResponseFormat, Sampling, Tool
from .tools import CALL, END_THINK, THINK, call_grammar

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_OWN = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    prompts: list[list[int]]
    params: SamplingParams
    texts: list[str]  # of the prompts, for echo
    may_think: bool = False
    is_thinking: bool = False  # the prompt opens a think tag


class Preparer:
    def __init__(self, tokenizer: "Tokenizer", *, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer, self.max_model_len, self.vocab_size = tokenizer, max_model_len, vocab_size
        self._grammars = Grammars(tokenizer, vocab_size)
        self._may_think = tokenizer.token_id(END_THINK) is not None

    def chat(self, request: ChatRequest) -> Prepared:
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
        tools = request.tools if request.uses_tools else None
        text = self.render(request.messages, tools, request.add_generation_prompt, variables)
        prompt = self.encode(text, add_special=False)
        is_thinking = self._may_think and text.rstrip().endswith(THINK)
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        asked = request.max_completion_tokens or request.max_tokens
        params = self._params(
            request,
            max_tokens=asked,
            logprobs=num_top,
            allow=self._allow(request, self._chat_grammar(request), is_thinking=is_thinking),
        )
        self._check_length(prompt, asked)
        return Prepared(
            prompts=[prompt], params=params, texts=[text], may_think=self._may_think, is_thinking=is_thinking
        )

    def completion(self, request: CompletionRequest) -> Prepared:
        prompts: list[list[int]] = []
        texts: list[str] = []
        for prompt in _each(request.prompt):
            if isinstance(prompt, str):
                ids = self.encode(prompt, add_special=request.add_special_tokens)
            else:
                ids = list(prompt)
            self._check_ids(ids)
            self._check_length(ids, request.max_tokens)
            prompts.append(ids)
            if request.echo:
                texts.append(prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, skip_special=False))
        params = self._params(
            request,
            max_tokens=None if request.max_tokens is None else max(request.max_tokens, 1),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            allow=self._allow(request, self._format_grammar(request.response_format), is_thinking=False),
        )
        return Prepared(prompts=prompts, params=params, texts=texts)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        if bad := [name for name in _OWN if name in variables]:
            raise ApiError(400, f"chat_template_kwargs: {bad[0]} has a field of its own", param="chat_template_kwargs")
        given = [_message(message) for message in messages]
        listed = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
        try:
            return self.tokenizer.apply_chat_template(
                given, tools=listed, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template is a program, and its variables come from the client
            raise ApiError(400, f"the chat template failed: {error}", param="messages") from error

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        text.encode()  # half a surrogate pair raises here
        return self.tokenizer.encode(text, add_special=add_special)

    def _params(self, request: Sampling, **others: Any) -> SamplingParams:
        """The request's own, else what the model's authors recommend, else the engine's defaults."""
        names = (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "top_k",
        )
        asked = self.tokenizer.sampling | {
            name: value for name in names if (value := getattr(request, name)) is not None
        }
        if asked.get("top_k") is not None:
            asked["top_k"] = max(int(asked["top_k"]), 0)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        for field, ids in (("logit_bias", request.logit_bias or {}), ("stop_token_ids", request.stop_token_ids or [])):
            if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
                raise ApiError(400, f"{field}: {bad[:4]} are outside the vocabulary of {self.vocab_size}", param=field)
        return SamplingParams(
            **asked,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            logit_bias=request.logit_bias or {},
            n=request.n or 1,
            seed=request.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            include_stop=request.include_stop_str_in_output,
            **others,
        )

    def _chat_grammar(self, request: ChatRequest) -> str | None:
        if request.forces_a_tool:
            assert request.tools is not None
            assert request.tool_choice is not None
            return call_grammar(
                request.tools,
                request.tool_choice,
                is_parallel=request.parallel_tool_calls is not False,
                has_tokens=self.tokenizer.token_id(CALL) is not None,
            )
        return self._format_grammar(request.response_format)

    def _format_grammar(self, asked: ResponseFormat | None) -> str | None:
        if asked is None or asked.type == "text":
            return None
        schema = asked.json_schema.schema_ if asked.json_schema else None
        return self._grammars.json_schema({"type": "object"} if schema is None else schema)

    def _allow(self, request: Sampling, grammar: str | None, *, is_thinking: bool) -> Any:
        if grammar is None:
            return None
        if request.min_tokens:
            raise ApiError(400, "min_tokens and a grammar exclude each other: the grammar says when the text ends")
        return self._grammars.compile(grammar, is_thinking=is_thinking, num_copies=request.n or 1)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if bad := [i for i in ids if i >= self.vocab_size]:
            raise ApiError(
                400, f"prompt: ids {bad[:4]} are outside the vocabulary of {self.vocab_size}", param="prompt"
            )

    def _check_length(self, ids: Sequence[int], max_tokens: int | None) -> None:
        asked = max(1, max_tokens or 1)
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        if len(ids) + asked > self.max_model_len:
            what = f"the prompt has {len(ids)} tokens and {asked} more are asked for"
            limit = f"this model's sequences have up to {self.max_model_len}"
            raise ApiError(400, f"{what}; {limit}. Shorten one of them.", code="context_length_exceeded")


def _each(prompt: str | Sequence[Any]) -> Sequence[str | Sequence[int]]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _message(message: ChatMessage) -> dict[str, Any]:
    """As templates want it: content is text, arguments are objects."""
    found = message.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    content = message.content
    found["content"] = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    for call in found.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except json.JSONDecodeError:
                raise ApiError(400, f"messages: the arguments of {function['name']!r} are not JSON") from None
    return found
