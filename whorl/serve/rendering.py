"""`/v1/chat/completions/render`: the token ids and pictures of a conversation, to be sent to `/inference/v1/generate`.

What the answer calls features has vLLM's form. Its data are opaque to clients; here they are the pictures as they came,
so that the second request is read within the same limits, and shares its prefix with the conversation itself.
"""

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from whorl.media import MediaItem

from .api_error import ApiError
from .dialects import REQUEST_ID
from .media_intake import media_parts
from .schema_parts import SAMPLING, ChatMessage, ImagePart, Strict, VideoPart
from .schemas import ChatRequest

if TYPE_CHECKING:
    from .service import Service

_MORE = ("min_tokens", "logit_bias", "stop_token_ids", "ignore_eos")  # what both routes have beside the sampling
Kind = Literal["image", "video"]
_PART: TypeAdapter[ImagePart | VideoPart] = TypeAdapter(Annotated[ImagePart | VideoPart, Field(discriminator="type")])


class Span(Strict):
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=0)]
    is_embed: list[bool] | None = None


class Features(Strict):
    """Pictures and videos by kind. They belong to the prompt's placeholders in the order of their offsets."""

    mm_hashes: dict[Kind, list[str]] = Field(default_factory=dict, description="no effect")
    mm_placeholders: dict[Kind, list[Span]]
    kwargs_data: dict[Kind, list[str]]

    def messages(self) -> list[ChatMessage]:
        """Return a message with the pictures and videos. Raises ApiError for data that no render has written."""
        spans = {kind: len(spans) for kind, spans in self.mm_placeholders.items()}
        if spans != {kind: len(data) for kind, data in self.kwargs_data.items()}:
            raise ApiError(400, "features: mm_placeholders and kwargs_data differ in their numbers", param="features")
        pairs = [
            (span.offset, data)
            for kind, spans in self.mm_placeholders.items()
            for span, data in zip(spans, self.kwargs_data[kind], strict=True)
        ]
        parts = [_part(data) for _, data in sorted(pairs, key=lambda pair: pair[0])]
        return [ChatMessage.model_validate({"role": "user", "content": parts})] if parts else []


def _part(data: str) -> ImagePart | VideoPart:
    try:
        return _PART.validate_json(base64.b64decode(data, validate=True))
    except (ValueError, ValidationError):
        problem = "expected what /v1/chat/completions/render of this server has returned"
        raise ApiError(400, f"features: kwargs_data cannot be read; {problem}", param="features") from None


class RenderApi:
    """The handler of `/v1/chat/completions/render`."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def render(self, request: ChatRequest, http: Request) -> Response:
        """Return the token ids of a conversation as a request to /inference/v1/generate."""
        service = self._service
        model = service.model_name(request.model)
        prepared = await service.preparer.chat(request)
        (ids,) = prepared.prompts
        if request.stop or prepared.params.allow is not None:
            raise ApiError(400, "stop strings and grammars do not go with token ids: leave them out", param="stop")
        names = {*SAMPLING, *_MORE} & request.model_fields_set
        params = request.model_dump(include=names, exclude_none=True, mode="json")
        # The route has another default for the temperature than the model.
        params |= {"max_tokens": prepared.params.max_tokens, "n": request.n or 1}
        params |= {"temperature": prepared.params.temperature}
        body = {"request_id": http.scope[REQUEST_ID], "model": model, "token_ids": list(ids)}
        features = None if not prepared.media else self._features(request, ids, prepared.media)
        return JSONResponse(body | {"features": features, "sampling_params": params})

    def _features(self, request: ChatRequest, ids: Sequence[int], items: Sequence[MediaItem]) -> dict[str, Any]:
        placement = self._service.llm.place(ids, items)
        assert placement is not None, "a model without a tower takes no pictures"
        hashes: dict[str, list[str]] = {}
        spans: dict[str, list[dict[str, int]]] = {}
        data: dict[str, list[str]] = {}
        for placed, (_, part) in zip(placement.items, media_parts(request.messages), strict=True):
            kind = placed.item.kind
            written = json.dumps(part.model_dump(mode="json", exclude_none=True)).encode()
            hashes.setdefault(kind, []).append(placed.item.digest.hex())
            spans.setdefault(kind, []).append({"offset": placed.start, "length": placed.stop - placed.start})
            data.setdefault(kind, []).append(base64.b64encode(written).decode())
        return {"mm_hashes": hashes, "mm_placeholders": spans, "kwargs_data": data}
