"""`/v1/embeddings`: one vector of length 1 for each text, from a model that was trained for embeddings."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from .api_error import ApiError
from .prepare import Prepared
from .replies import Reply, Run
from .schema_parts import Ids, Priority, Strict, at_most
from .schemas import CompletionRequest, kind_of_prompt

if TYPE_CHECKING:
    from torch import Tensor

    from .service import Service

MAX_TEXTS = 2048
LAST_TOKEN = "lasttoken"
_SOME = Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)


def read_pooling(folder: Path) -> str | None:
    """Return how a model pools its hidden states into one vector, in sentence-transformers' words.

    None: the model is not an embedding model. Raises ValueError when its files cannot be read.
    """
    modules, pooling = folder / "modules.json", folder / "1_Pooling" / "config.json"
    if not modules.is_file() or not pooling.is_file():
        return None
    try:
        config = json.loads(pooling.read_text(encoding="utf-8"))
        # Newer files name the mode, older ones have a boolean for each mode.
        mode = config.get("pooling_mode")
        names = [mode] if mode else [n.removeprefix("pooling_mode_") for n, is_on in config.items() if is_on is True]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"serve: {pooling}: cannot be read: {error}") from error
    return ", ".join(sorted(str(name) for name in names if name != "include_prompt"))


class EmbeddingRequest(Strict):
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Ids, Field(min_length=1), Tag("ids")]
        | Annotated[list[str], _SOME, at_most(MAX_TEXTS), Tag("texts")]
        | Annotated[list[Ids], _SOME, at_most(MAX_TEXTS), Tag("lists")],
        Discriminator(kind_of_prompt),
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="keep only this many leading dimensions, for models that were trained for it"
    )
    add_special_tokens: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Priority = 0
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    user: str | None = Field(None, description="no effect")

    @property
    def prompts(self) -> CompletionRequest:
        """The completion request with the same prompts."""
        same = self.model_dump(include={"add_special_tokens", "truncate_prompt_tokens"})
        return CompletionRequest.model_validate({"prompt": self.input, "max_tokens": 1, **same})


class EmbeddingsApi:
    """The handler of `/v1/embeddings`. pooling: as `read_pooling` returns it."""

    def __init__(self, service: "Service", pooling: str | None) -> None:
        self._service, self._pooling = service, pooling

    async def create(self, request: EmbeddingRequest, http: Request) -> Response:
        """Return a vector for each text."""
        return await self.embed(request, http, EmbeddingReply)

    async def embed(self, request: EmbeddingRequest, http: Request, reply: "type[EmbeddingReply]") -> Response:
        """Embed the texts. reply: formats the vectors."""
        self._check()
        fields = {name: getattr(request, name) for name in ("model", "cache_salt", "priority")}
        completion = request.prompts.model_copy(update=fields)

        async def prepare(completion: CompletionRequest) -> Prepared:
            prepared = await self._service.preparer.completion(completion)
            return replace(prepared, params=replace(prepared.params, embed=True))

        return await self._service.generate(completion, http, prepare, lambda run: reply(request, completion, run))

    def _check(self) -> None:
        if self._pooling == LAST_TOKEN:
            return
        name = self._service.settings.names[0]
        reason = "was not made for embeddings: it has no 1_Pooling/config.json"
        if self._pooling is not None:
            reason = f"makes embeddings by {self._pooling}, and this server knows {LAST_TOKEN} alone"
        message = f"the model {name!r} {reason}. Serve one such as Qwen/Qwen3-Embedding-0.6B"
        raise ApiError(400, message, param="model", code="not_an_embedding_model")


class EmbeddingReply(Reply):
    """Formats the embeddings of a request's prompts."""

    def __init__(self, request: EmbeddingRequest, completion: CompletionRequest, run: Run) -> None:
        super().__init__(completion, run)
        self._request, self._run = request, run

    async def complete(self, deadline: float) -> dict[str, Any]:
        async for _ in self.job.outputs(deadline):
            pass
        vectors = [self._vector(seq.embedding) for seq in self.job.sequences]
        num_tokens = sum(seq.prompt_len for seq in self.job.sequences)
        return {
            "id": f"embd-{self._run.request_id}",
            "object": "list",
            "model": self._run.model,
            "data": [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _vector(self, hidden: "Tensor | None") -> list[float] | str:
        from torch.nn.functional import normalize

        assert hidden is not None, "the engine keeps the hidden state when params.embed is set"
        size = self._request.dimensions
        if size is not None and size > len(hidden):
            raise ApiError(400, f"dimensions is {size}; this model has {len(hidden)}", param="dimensions")
        vector = normalize(hidden[:size], dim=0)
        if self._request.encoding_format == "base64":
            return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        return vector.tolist()  # type: ignore[no-any-return]
