"""Request schemas of `/api`, with Ollama's names. A field that is not declared here is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import Field

from .refused_fields import Refused
from .schema_parts import (
    MAX_PARTS,
    FunctionCall,
    Lenient,
    SamplingFields,
    Stop,
    Strict,
    Tools,
    few_parts,
)

_LOADED = "no effect: one model is served, and stays"
_OWN = "no effect: an option of the server"
_NO_MIROSTAT = "there is no mirostat: send min_p or top_p"


class Function(FunctionCall):
    index: int | None = Field(None, description="no effect: the order of the list counts")


class Call(Lenient):
    function: Function
    id: str | None = None
    index: int | None = Field(None, description="no effect: the order of the list counts")
    type: Literal["function"] = "function"


class OllamaMessage(Lenient):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Options(SamplingFields):
    """Ollama's options beside the sampling parameters that all APIs have."""

    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(
        None, description="longest answer; 0, -1 and -2: until the context is full"
    )
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    repeat_penalty: float | None = Field(None, description="repetition_penalty by its other name")
    num_ctx: int | None = Field(None, description=f"{_OWN}: --max-seq")
    num_batch: int | None = Field(None, description=f"{_OWN}: --max-step-tokens")
    num_thread: int | None = Field(None, description=f"{_OWN}: --threads")
    num_keep: int | None = Field(None, description="no effect: nothing is dropped in the middle of an answer")
    num_gpu: int | None = Field(None, description=f"{_OWN}: --device")
    main_gpu: int | None = Field(None, description=f"{_OWN}: --device")
    numa: bool | None = Field(None, description="no effect")
    low_vram: bool | None = Field(None, description="no effect")
    f16_kv: bool | None = Field(None, description=f"{_OWN}: --kv-cache-dtype")
    use_mmap: bool | None = Field(None, description="no effect")
    use_mlock: bool | None = Field(None, description="no effect")
    repeat_last_n: int | None = Field(None, description="no effect: penalties count the whole text")
    penalize_newline: bool | None = Field(None, description="no effect: a line break is a token like others")
    mirostat: Annotated[None, Refused(_NO_MIROSTAT, (0,))] = None
    mirostat_tau: float | None = Field(None, description="no effect without mirostat")
    mirostat_eta: float | None = Field(None, description="no effect without mirostat")
    tfs_z: Annotated[None, Refused("there is no tail-free sampling: send min_p", (1, 1.0))] = None
    typical_p: Annotated[None, Refused("there is no typical sampling: send min_p", (1, 1.0))] = None


class ModelRequest(Strict):
    model: Annotated[str, Field(min_length=1)]
    keep_alive: float | str | None = Field(None, description=_LOADED)


class GeneratingRequest(ModelRequest):
    """The fields that chat and generate share."""

    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: bool | None = Field(None, description="true: a longer prompt loses its beginning; default: it is refused")
    shift: bool | None = Field(None, description="no effect: an answer ends where the context is full")

    @property
    def streams(self) -> bool:
        return self.stream is not False


class OllamaChat(GeneratingRequest):
    messages: Annotated[
        list[OllamaMessage],
        Field(fail_fast=True, max_length=MAX_PARTS),
        few_parts(("images", "tool_calls"), "messages, pictures and calls"),
    ] = Field(default_factory=list)
    tools: Tools | None = None


class OllamaGenerate(GeneratingRequest):
    prompt: str = ""
    system: str | None = None
    images: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None
    raw: bool = False
    suffix: Annotated[None, Refused("nothing is filled in before it: write the model's own tokens for that", ("",))] = (
        None
    )
    template: Annotated[None, Refused("a template is a program, and none is taken from a request", ("",))] = None
    context: Annotated[None, Refused("send the conversation to /api/chat", ([],))] = None


class OllamaEmbed(ModelRequest):
    input: str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=2048)]
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    options: Options | None = None


class OllamaEmbedding(ModelRequest):
    prompt: str
    options: Options | None = None


class ShowRequest(Strict):
    model: str | None = None
    name: str | None = Field(None, description="model by its older name")
    verbose: bool | None = Field(None, description="no effect")
