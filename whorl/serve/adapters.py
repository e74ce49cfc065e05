"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that come and go while the server runs.

Routes and fields are vLLM's. A loaded adapter is a model of its own name. The server has the routes only if it was
started with --runtime-lora: a client names a folder of the server's machine or a repository that is downloaded.
"""

import asyncio
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from .api_error import ApiError
from .schema_parts import Strict

if TYPE_CHECKING:
    from .service import Service

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapter(Strict):
    lora_name: Name = Field(description="the name by which requests choose the adapter, as their model")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="a folder that PEFT wrote, on the server's machine, or a Hugging Face id"
    )
    load_inplace: bool = Field(False, description="take the name of a loaded adapter; running requests keep theirs")
    base_model_name: str | None = Field(None, description="no effect")


class UnloadAdapter(Strict):
    lora_name: Name
    lora_int_id: int | None = Field(None, description="no effect")


class AdaptersApi:
    """The handlers of the routes."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def load(self, request: LoadAdapter) -> Response:
        """Load an adapter. The file is read beside the engine's steps; requests go on meanwhile."""
        from whorl.engine.lora import read_adapter
        from whorl.engine.memory import OutOfMemory

        self._check()
        name, llm = request.lora_name, self._service.llm
        if name in self._service.settings.names:
            raise ApiError(400, f"{name!r} is a name of the model itself; give the adapter another", param="lora_name")
        if name in llm.adapters.by_name and not request.load_inplace:
            message = f"{name!r} is loaded; unload it first, or set load_inplace"
            raise ApiError(400, message, param="lora_name", code="already_loaded")
        file = await asyncio.to_thread(read_adapter, request.lora_path)
        try:
            await self._service.engine.on_engine(lambda: llm.load_lora(name, file, replace=request.load_inplace))
        except OutOfMemory as error:
            raise ApiError(503, str(error), code="out_of_memory") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: UnloadAdapter) -> Response:
        """Unload an adapter. Requests that use it are answered to their end."""
        self._check()
        name, llm = request.lora_name, self._service.llm
        if name not in llm.adapters.by_name:
            raise ApiError(404, f"no adapter is named {name!r}", param="lora_name", code="model_not_found")
        await self._service.engine.on_engine(lambda: llm.unload_lora(name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _check(self) -> None:
        if not self._service.settings.runtime_lora:
            message = "adapters are loaded at the start only; start the server with --runtime-lora to load them later"
            raise ApiError(403, message, code="runtime_lora_off")
        self._service.engine.check()
