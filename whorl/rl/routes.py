"""The routes by which trainers steer a server: vLLM's for RLHF, SGLang's, and those of prime-rl.

They exist with `--rl` only, and need the API key if the server has one. Their names, fields and answers are those of
the originals, so that trainers need no change; errors are this server's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Body, Query
from pydantic import Field
from starlette.responses import JSONResponse, Response

from whorl.serve.adapters import AdaptersApi, LoadAdapter
from whorl.serve.api_error import ApiError
from whorl.serve.schema_parts import Strict

from .server_info import server_info
from .sync import Sync

if TYPE_CHECKING:
    from fastapi import FastAPI

    from whorl.engine.control import PauseMode
    from whorl.serve.service import Service

Mode = Literal["abort", "wait", "keep"]
_POLL_SECONDS = 0.01
_Info = Annotated[dict[str, Any], Body(embed=True)]
_Version = Annotated[str, Field(min_length=1, max_length=256)]


class Nothing(Strict):
    """A body without fields."""


class Aborted(Strict):
    request_ids: list[str] | None = None


class Finished(Strict):
    weight_version: _Version | None = None


class Renamed(Strict):
    new_version: _Version


class Started(Strict):
    is_checkpoint_format: Literal[True] = Field(True, description="tensors have the names of a checkpoint")
    partial: bool = Field(False, description="tensors that do not come keep their values; else all must come")


class FromFolder(Strict):
    """prime-rl's body has `weight_dir`; vLLM's has `update_info`."""

    update_info: dict[str, Any] | None = None
    weight_dir: str | None = None
    weight_version: _Version | None = None


class FromDisk(Strict):
    """SGLang's."""

    model_path: str
    load_format: str | None = Field(None, description="no effect: safetensors are read")
    flush_cache: bool = Field(True, description="no effect: what old weights computed is never used again")
    abort_all_requests: bool = False
    is_async: bool = Field(False, description="no effect")
    weight_version: _Version | None = None


class Tags(Strict):
    tags: list[str] | None = None


class SleepBody(Strict):
    """SkyRL sends a body in place of a query."""

    level: Annotated[int, Field(ge=0, le=2)] = 1
    tags: list[str] | None = Field(None, description="no effect: weights and cache sleep together")


class ResetBody(Strict):
    reset_running_requests: bool = False


class Broadcaster(Strict):
    """prime-rl's."""

    host: str
    port: int
    rank_offset: Annotated[int, Field(ge=0)]
    inference_world_size: Annotated[int, Field(ge=1)]
    timeout: Annotated[float, Field(gt=0)] = 300
    quantize_in_weight_transfer: Literal[False] = False
    session_id: str | None = None


class Api:
    """The handlers."""

    def __init__(self, service: "Service", sync: Sync) -> None:
        self._service, self._engine, self._llm, self._sync = service, service.engine, service.llm, sync

    # ---- pauses

    async def pause(self, mode: Mode = "abort", clear_cache: bool = True) -> Response:
        """Hold the engine; requests are aborted, finished or kept."""
        await self._pause(mode)
        return JSONResponse({"status": "paused"})

    async def _pause(self, mode: "PauseMode") -> None:
        await self._engine.on_engine(lambda: self._llm.pause(mode))
        while mode == "wait" and await self._engine.on_engine(lambda: self._llm.may_step):
            await asyncio.sleep(_POLL_SECONDS)

    async def resume(self) -> Response:
        """Go on."""
        await self._engine.on_engine(self._llm.resume)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self) -> Response:
        return JSONResponse({"is_paused": self._llm.control.pause_mode is not None})

    async def abort_requests(self, body: Aborted | None = None) -> Response:
        """Abort every request in progress; their answers have what was generated, with the reason abort."""
        if body is not None and body.request_ids:
            raise ApiError(
                400, "request_ids: close the connection of a request to abort it; without ids all are aborted"
            )
        count = await self._engine.on_engine(self._abort_all)
        return JSONResponse({"status": "aborted", "aborted": count})

    def _abort_all(self) -> int:
        before = len(self._llm.control.deltas)
        self._llm.control.abort_all()
        return len(self._llm.control.deltas) - before

    # ---- weights

    async def init_weight_transfer_engine(self, init_info: _Info) -> Response:
        """Join the trainer's group."""
        await self._sync.begin_transfer(init_info)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def shutdown_weight_transfer_engine(self, body: Nothing | None = None) -> Response:
        """Leave the trainer's group."""
        await self._sync.end_transfer()
        return JSONResponse({"message": "Weight transfer shut down"})

    async def start_weight_update(self, body: Started | None = None) -> Response:
        """Begin an update: no step runs until it is finished."""
        await self._sync.start(is_partial=body is not None and body.partial)
        return JSONResponse({"message": "Weight update started"})

    async def start_draft_weight_update(self, body: Nothing | None = None) -> Response:
        """Refused: drafts come from the model itself, or from one that stays as it is."""
        raise ApiError(400, "this server has no draft weights to update; drafts never change what is generated")

    async def update_weights(self, body: FromFolder) -> Response:
        """Receive the tensors that are announced, or read all of a folder."""
        is_primes = "weight_dir" in body.model_fields_set
        if (body.update_info is None) != is_primes:
            raise ApiError(400, "give either update_info, as vLLM's trainers do, or weight_dir, as prime-rl's do")
        if is_primes:
            version = await self._sync.read(body.weight_dir, body.weight_version)
            return JSONResponse({"message": "Weights updated", "status": "ok", "weight_version": version})
        assert body.update_info is not None
        await self._sync.receive(body.update_info)
        return JSONResponse({"message": "Weights updated"})

    async def finish_weight_update(self, body: Finished | None = None) -> Response:
        """End an update; the weights get a version."""
        version = await self._sync.finish(None if body is None else body.weight_version)
        return JSONResponse({"message": "Weight update finished", "weight_version": version})

    async def update_weight_version(self, body: Renamed) -> Response:
        """Give the weights another version."""

        def rename() -> None:
            self._llm.control.version = body.new_version

        await self._engine.on_engine(rename)
        return JSONResponse({"success": True, "new_version": body.new_version})

    async def weight_info(self) -> Response:
        return JSONResponse({"weight_version": self._llm.weight_version})

    async def update_weights_from_disk(self, body: FromDisk) -> Response:
        """Read new weights from a folder of safetensors."""
        if body.abort_all_requests:
            await self._engine.on_engine(self._llm.control.abort_all)
        await self._sync.read(body.model_path, body.weight_version)
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def load_lora_adapter(self, body: LoadAdapter) -> Response:
        """prime-rl's, of every step: the adapter takes the place of the one that has its name."""
        return await AdaptersApi(self._service).load(body.model_copy(update={"load_inplace": True}))

    # ---- memory

    async def sleep(
        self, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort", body: SleepBody | None = None
    ) -> Response:
        """Give the memory of weights and cache back; at level 0 only hold the engine."""
        level = level if body is None or "level" not in body.model_fields_set else body.level
        if level == 0 or mode == "wait":
            await self._pause(mode)
        if level:
            await self._engine.on_engine(lambda: self._llm.sleep(level, mode=mode))
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake_up(self, tags: Annotated[list[str] | None, Query()] = None, body: Tags | None = None) -> Response:
        """Take the memory again, and go on if all is there."""
        tags = tags if body is None or body.tags is None else body.tags

        def wake() -> bool:
            self._llm.wake(tags)
            if not self._llm.control.asleep and self._llm.control.torn is None:
                self._llm.resume()
            return not self._llm.control.asleep

        is_awake = await self._engine.on_engine(wake)
        return JSONResponse({"status": "awake" if is_awake else "sleeping", "tags": tags})

    async def is_sleeping(self) -> Response:
        return JSONResponse({"is_sleeping": bool(self._llm.control.asleep)})

    async def release_memory(self, body: Tags | None = None) -> Response:
        """SGLang's name of sleep; both tags are released together."""
        await self._engine.on_engine(lambda: self._llm.sleep(1, mode="keep"))
        return JSONResponse({"success": True})

    async def resume_memory(self, body: Tags | None = None) -> Response:
        return await self._awake(None if body is None else body.tags)

    async def _awake(self, tags: list[str] | None) -> Response:
        await self.wake_up(tags)
        return JSONResponse({"success": True})

    # ---- caches and facts

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_external: bool = False, body: ResetBody | None = None
    ) -> Response:
        """Clear the prefix cache; requests in progress are computed again from their tokens."""
        await self._engine.on_engine(self._llm.forget)
        return JSONResponse({"success": True})

    async def init_broadcaster(self, body: Broadcaster) -> Response:
        """Join the group of a trainer of prime-rl."""
        await self._sync.join_layers(body.model_dump())
        return JSONResponse({"status": "ok"})

    async def reset_mm_cache(self) -> Response:
        return await self.reset_prefix_cache()

    async def get_world_size(self, include_dp: bool = True) -> Response:
        """Say how many members of a trainer's group this server is: one, which sends weights on to its other ranks."""
        return JSONResponse({"world_size": 1})

    async def server_info(self, config_format: Literal["text", "json"] = "text") -> Response:
        """Describe the server as vLLM does, as far as trainers read it."""
        info = server_info(self._llm, self._service.settings, self._sync.backend)
        return JSONResponse(info | ({"vllm_config": str(info["vllm_config"])} if config_format == "text" else {}))

    async def liveness(self) -> Response:
        """Say that the server answers; /health says whether it serves."""
        return JSONResponse({"status": "ok"})


def add_routes(app: "FastAPI", service: "Service") -> None:
    """Add the routes of trainers to the application of a server."""
    sync = Sync(service.llm, service.engine, service.settings.weight_transfer_config)
    app.state.sync = sync
    api = Api(service, sync)
    posts: dict[str, Callable[..., Awaitable[Response]]] = {
        "/pause": api.pause,
        "/pause_generation": api.pause,
        "/resume": api.resume,
        "/continue_generation": api.resume,
        "/abort_requests": api.abort_requests,
        "/init_weight_transfer_engine": api.init_weight_transfer_engine,
        "/shutdown_weight_transfer_engine": api.shutdown_weight_transfer_engine,
        "/start_weight_update": api.start_weight_update,
        "/start_draft_weight_update": api.start_draft_weight_update,
        "/update_weights": api.update_weights,
        "/update_weights_from_disk": api.update_weights_from_disk,
        "/finish_weight_update": api.finish_weight_update,
        "/update_weight_version": api.update_weight_version,
        "/sleep": api.sleep,
        "/wake_up": api.wake_up,
        "/release_memory_occupation": api.release_memory,
        "/resume_memory_occupation": api.resume_memory,
        "/reset_prefix_cache": api.reset_prefix_cache,
        "/reset_mm_cache": api.reset_mm_cache,
        "/init_broadcaster": api.init_broadcaster,
        "/load_lora_adapter": api.load_lora_adapter,
    }
    gets: dict[str, Callable[..., Awaitable[Response]]] = {
        "/is_paused": api.is_paused,
        "/is_sleeping": api.is_sleeping,
        "/weight_info": api.weight_info,
        "/get_world_size": api.get_world_size,
        "/server_info": api.server_info,
        "/get_server_info": api.server_info,
        "/get_weight_version": api.weight_info,
        "/flush_cache": api.reset_mm_cache,
        "/health_generate": service.health,
        "/liveness": api.liveness,
    }
    for method, handlers in (("POST", posts), ("GET", gets)):
        for path, function in handlers.items():
            app.add_api_route(path, function, methods=[method])
