"""Fields of vLLM's and OpenAI's requests that this server refuses, each with what to do instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from .schema_parts import Strict

REFUSED = "refused otherwise"  # how the descriptions of these fields begin


@dataclass(frozen=True, slots=True)
class Refused:
    """The annotation of a field that is refused. why: what the server lacks, or what to send instead. neutral: the
    values that ask for nothing, beside None; they are accepted, since many clients send them."""

    why: str
    neutral: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Mapping[str, Any]:
        return {"enum": [None, *self.neutral], "description": f"{REFUSED}: {self.why}"}

    def _check(self, value: Any) -> None:
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.neutral
        ):
            raise ValueError(f"is refused: {self.why}")


_ELSEWHERE = "POST /inference/v1/generate takes and returns token ids"
_NO_MEDIA_OPTIONS = "pictures and videos are read in one way, which the model's own files say"
_NO_FILTERS = "a request cannot bring code or plug-ins of another server"


class RefusedFields(Strict):
    """Of requests that generate text, whatever their form."""

    kv_transfer_params: Annotated[None, Refused(_NO_FILTERS)] = None
    request_id: Annotated[None, Refused("send it in the header X-Request-Id")] = None
    vllm_xargs: Annotated[None, Refused(_NO_FILTERS, ({},))] = None


class RefusedSampling(RefusedFields):
    """Of chat and completions."""

    bad_words: Annotated[None, Refused("send the ids of their tokens in logit_bias, with -100", ([],))] = None
    guided_whitespace_pattern: Annotated[None, Refused("put white space into guided_grammar or guided_regex")] = None
    length_penalty: Annotated[None, Refused("it ranks beams, and there is no beam search", (1.0,))] = None
    logits_processors: Annotated[None, Refused(_NO_FILTERS, ([],))] = None
    repetition_detection: Annotated[None, Refused("send repetition_penalty or frequency_penalty")] = None
    structural_tag: Annotated[None, Refused("send tools, or structured_outputs.grammar")] = None
    truncation_side: Annotated[None, Refused("a prompt loses its beginning, never its end", ("left",))] = None
    use_beam_search: Annotated[None, Refused("there is no beam search; send n for several answers", (False,))] = None


class RefusedChat(RefusedSampling):
    """Of chat alone."""

    audio: Annotated[None, Refused("this server answers in text")] = None
    chat_template: Annotated[
        None, Refused("a template is a program, and none is taken from a request: start with --chat-template FILE")
    ] = None
    # Chat has its own field, with another default, than completions.
    add_special_tokens: Annotated[None, Refused("the template writes every token of the prompt", (False,))] = None
    echo: Annotated[None, Refused("the answer has new text only; put the last message before it", (False,))] = None
    function_call: Annotated[None, Refused("it is the old form of tool_choice: send that", ("none",))] = None
    functions: Annotated[None, Refused("it is the old form of tools: send those", ([],))] = None
    include_reasoning: Annotated[None, Refused("to turn thinking off send reasoning_effort none", (True,))] = None
    media_io_kwargs: Annotated[None, Refused(_NO_MEDIA_OPTIONS, ({},))] = None
    mm_processor_kwargs: Annotated[None, Refused(_NO_MEDIA_OPTIONS, ({},))] = None
    thinking_token_budget: Annotated[None, Refused("max_completion_tokens counts thinking, too")] = None
    web_search_options: Annotated[None, Refused("this server searches nothing: give the model a tool")] = None


class RefusedCompletion(RefusedSampling):
    """Of completions alone."""

    prompt_embeds: Annotated[None, Refused("a prompt is text or token ids")] = None
    suffix: Annotated[
        None, Refused("nothing is filled in before it: write the model's own tokens for that into the prompt", ("",))
    ] = None


class RefusedResponses(RefusedFields):
    """Of `/v1/responses`, which keeps nothing and runs no tools."""

    context_management: Annotated[None, Refused("the conversation is read as it is sent", ([],))] = None
    enable_response_messages: Annotated[None, Refused(_ELSEWHERE, (False,))] = None
    media_io_kwargs: Annotated[None, Refused(_NO_MEDIA_OPTIONS, ({},))] = None
    mm_processor_kwargs: Annotated[None, Refused(_NO_MEDIA_OPTIONS, ({},))] = None
    previous_input_messages: Annotated[None, Refused("send the whole conversation in input")] = None
    prompt: Annotated[None, Refused("no prompts are stored here: send it in input")] = None


class RefusedMessages(Strict):
    """Of `/v1/messages`, which keeps nothing and runs no tools."""

    container: Annotated[None, Refused("this server runs no code: give the model a tool")] = None
    context_management: Annotated[None, Refused("the conversation is read as it is sent", ({},))] = None
    mcp_servers: Annotated[None, Refused("this server calls no other: give the model a tool", ([],))] = None
