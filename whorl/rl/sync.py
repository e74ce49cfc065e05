"""The weights of a running server, from the trainer's first word of an update to the new version.

One update at a time. While one is in progress no step runs and requests wait. Tensors are received and copied on a
thread of their own, so that the server goes on answering; the engine's thread only begins and ends the update.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

from whorl.engine.sequence import WeightsError
from whorl.serve.api_error import ApiError

from .transfers import Announced, Batch, TransferError, announced
from .transfers.files import read_folder
from .transfers.group import GlooWire, GroupInfo, GroupTransfer, NcclWire
from .transfers.layers import LayersTransfer
from .transfers.memory import IpcTransfer, SharedMemoryTransfer

if TYPE_CHECKING:
    from whorl.engine.llm import LLM
    from whorl.serve.engine_thread import EngineThread

_LOG = logging.getLogger("whorl.rl")
BACKENDS = ("nccl", "gloo", "ipc", "shm")
SECONDS = 300.0  # without a word of the trainer, after which an update is given up
Transfer = GroupTransfer | IpcTransfer | SharedMemoryTransfer


def read_config(text: str | None, device: str) -> str:
    """Return the backend that `--weight-transfer-config` names. ValueError if it is not one that works here."""
    default = "nccl" if device == "cuda" else "gloo"
    if text is None:
        return default
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    backend = config.get("backend", default) if isinstance(config, dict) else None
    if backend not in BACKENDS:
        raise ValueError(f"serve: weight_transfer_config is {text!r}, expected a backend of {', '.join(BACKENDS)}")
    if backend in ("nccl", "ipc") and device != "cuda":
        raise ValueError(
            f"serve: weights come by {backend}, which needs a GPU, and the model is on {device}; take gloo"
        )
    return str(backend)


class Sync:
    """The updates of one server. seconds: how long to wait for the trainer."""

    def __init__(self, llm: "LLM", engine: "EngineThread", config: str | None, *, seconds: float = SECONDS) -> None:
        self.backend = read_config(config, llm.runner.device)
        self._llm, self._engine, self._seconds = llm, engine, seconds
        self._device = torch.device(llm.runner.device)
        self._transfer: Transfer | None = None
        self._layers: LayersTransfer | None = None  # prime-rl's way, which has routes of its own
        self._is_busy = False
        self._watch: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps weak references only
        from whorl.streams import carried_over

        self._use_stream = carried_over()

    # ---- what routes call

    async def begin_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Join the trainer's group, or note how it will share its memory."""
        async with self._alone():
            self._close()
            self._transfer = await self._finished(asyncio.to_thread(self._make_transfer, dict(init_info)))

    async def end_transfer(self) -> None:
        async with self._alone():
            self._close()

    async def start(self, *, is_partial: bool = False) -> None:
        """Begin an update."""
        async with self._alone():
            await self._engine.on_engine(lambda: self._llm.control.begin(is_partial=is_partial))
            self._wait_for_more()

    async def receive(self, update_info: Mapping[str, Any]) -> None:
        """Receive and copy the tensors that are announced."""
        if self._transfer is None:
            raise ApiError(409, "no transfer is prepared: POST /init_weight_transfer_engine first", code="transfer")
        transfer, info = self._transfer, dict(update_info)
        async with self._alone():
            is_whole = self._llm.control.update is None  # trainers that know no beginning send all tensors at once
            if is_whole:
                await self._engine.on_engine(self._llm.control.begin)
            await self._copy(lambda: transfer.receive(info), announced(info))
            if is_whole:
                self._stop_waiting()
                await self._engine.on_engine(lambda: self._llm.control.finish(None))

    async def finish(self, version: str | None) -> str:
        """End an update and return the version of the weights."""
        async with self._alone():
            self._stop_waiting()
            return await self._engine.on_engine(lambda: self._llm.control.finish(version))

    async def join_layers(self, init_info: Mapping[str, Any]) -> None:
        """Join prime-rl's group."""
        async with self._alone():
            self._close()
            self._layers = await self._finished(asyncio.to_thread(self._make_layers, dict(init_info)))

    async def read(self, folder: Any, version: str | None) -> str:
        """Do a whole update: from prime-rl's group if there is one, else from a folder of safetensors."""
        layers = self._layers
        async with self._alone():
            await self._engine.on_engine(self._llm.control.begin)
            await self._copy(lambda: read_folder(folder, self._device) if layers is None else layers.receive())
            self._stop_waiting()
            return await self._engine.on_engine(lambda: self._llm.control.finish(version))

    # ---- how

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Refuse a second call while one is in progress."""
        if self._is_busy:
            raise WeightsError("another sync of weights is in progress; wait for its answer")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    async def _finished(self, work: Any) -> Any:
        """Wait for work that goes on when the client is gone."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _copy(self, batches: Callable[[], Iterator[Batch]], tensors: Sequence[Announced] = ()) -> None:
        """Receive batches and copy them. tensors: what is announced, which is checked before any of it comes."""
        update = self._llm.control.update
        assert update is not None
        self._stop_waiting()
        try:
            update.check({tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors})
            await self._finished(asyncio.to_thread(self._copy_all, batches, update.copy))
        except asyncio.CancelledError:
            self._wait_for_more()
            raise
        except BaseException as error:
            await self._give_up(f"{type(error).__name__}: {error}")
            if isinstance(error, TransferError):
                raise ApiError(409, f"the weights did not come: {error}", code="transfer") from error
            raise
        self._wait_for_more()

    def _copy_all(self, batches: Callable[[], Iterator[Batch]], copy: Callable[[Batch], None]) -> None:
        """Copy on this thread, in the order of the engine's stream."""
        self._use_stream()
        for batch in batches():
            copy(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    async def _give_up(self, reason: str) -> None:
        """End an update that failed. The group is closed as well, so that a sender that waits in it learns of it."""
        _LOG.error("an update of the weights failed: %s", reason)
        self._close()
        await self._engine.on_engine(lambda: self._llm.control.fail(reason))

    def _wait_for_more(self) -> None:
        """Give the update up unless the trainer says something in time."""
        self._stop_waiting()
        loop = asyncio.get_running_loop()

        def expire() -> None:
            reason = f"the trainer was silent for {self._seconds:g} seconds"
            task = loop.create_task(self._give_up(reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._watch = loop.call_later(self._seconds, expire)

    def _stop_waiting(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._layers is not None:
            self._layers.close()
            self._layers = None

    def _make_transfer(self, info: dict[str, Any]) -> Transfer:
        if self.backend == "shm":
            return SharedMemoryTransfer()
        if self.backend == "ipc":
            return IpcTransfer(self._device)
        group = GroupInfo(info, seconds=self._seconds)
        return GroupTransfer(self._wire(group), packed=group.packed, packed_bytes=group.packed_bytes)

    def _make_layers(self, info: dict[str, Any]) -> LayersTransfer:
        places = {"master_address": info["host"], "master_port": info["port"], "rank_offset": info["rank_offset"] + 1}
        places["world_size"] = info["inference_world_size"] + 1
        seconds = min(self._seconds, info["timeout"])
        return LayersTransfer(self._wire(GroupInfo(places, seconds=seconds)))

    def _wire(self, group: GroupInfo) -> GlooWire | NcclWire:
        try:
            return NcclWire(group, self._device) if self.backend == "nccl" else GlooWire(group)
        except TransferError as error:
            raise ApiError(409, str(error), code="transfer") from error
