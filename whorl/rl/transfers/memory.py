"""Tensors in memory that the trainer and the engine can both read: shared memory of the host, or CUDA IPC.

vLLM's trainers pickle a handle for each tensor. Whorl's client names each storage once, in JSON, and tensors as parts
of them: thousands of experts are views of a few storages.
"""

import base64
import functools
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from whorl.rl.pickles import DTYPES, Named, ipc_handles

from .tensors import Announced, Batch, announced, unpacked

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")


class SharedMemoryTransfer:
    """Tensors one behind the other in shared memory: `update_info` names it, `{"shm": name}`, beside the tensors."""

    def receive(self, update_info: Mapping[str, Any]) -> Iterator[Batch]:
        tensors, name = announced(update_info), update_info.get("shm")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"update_info: shm is {name!r}, expected the name of shared memory")
        size = sum(tensor.nbytes for tensor in tensors)
        try:
            file = os.open(f"{_FOLDER}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise ValueError(f"update_info: shared memory {name!r} cannot be read: {error.strerror}") from None
        try:
            if os.fstat(file).st_size < size:
                raise ValueError(f"update_info: {name!r} has {os.fstat(file).st_size} bytes, expected {size}")
            if size:  # private: torch wants memory that it may write to, and nothing writes
                memory = mmap.mmap(file, size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
                yield unpacked(tensors, torch.frombuffer(memory, dtype=torch.uint8))
        finally:
            os.close(file)

    def close(self) -> None:
        pass


class IpcTransfer:
    """Tensors in the memory of a GPU that this process has, too.

    update_info has `ipc_storages` and `ipc_places`, as `senders.IpcSender` makes them, or vLLM's `ipc_handles_pickled`:
    a handle for each tensor, or one for a buffer of all, which the trainer fills again for the next call.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"ipc: the model is on {device.type}, and CUDA IPC needs a GPU; use shm or gloo")
        self._device = device
        self._buffer: tuple[Any, Tensor] | None = None  # mapped once for all chunks that come in it
        self._storages: dict[str, torch.UntypedStorage] = {}  # of the last update, mapped until the next

    def receive(self, update_info: Mapping[str, Any]) -> Iterator[Batch]:
        tensors = announced(update_info)
        with torch.cuda.device(self._device):
            yield (
                self._shared(tensors, update_info)
                if "ipc_storages" in update_info
                else self._pickled(tensors, update_info)
            )
            torch.cuda.synchronize()  # the trainer may write into the memory again once it is answered

    def _shared(self, tensors: list[Announced], update_info: Mapping[str, Any]) -> Batch:
        rows, places = update_info["ipc_storages"], update_info.get("ipc_places")
        if not isinstance(rows, list) or not isinstance(places, list) or len(places) != len(tensors):
            raise ValueError(f"update_info: expected lists ipc_storages, and ipc_places of {len(tensors)} tensors")
        keys = [json.dumps(row) for row in rows]
        self._storages = {
            key: self._storages.get(key) or _mapped_storage(row, self._device)
            for key, row in zip(keys, rows, strict=True)
        }
        bases: dict[tuple[int, torch.dtype], Tensor] = {}
        batch: Batch = []
        for tensor, place in zip(tensors, places, strict=True):
            if not (isinstance(place, list) and len(place) == 2 and all(type(n) is int and n >= 0 for n in place)):
                raise ValueError(
                    f"update_info: the place of {tensor.name} is {place!r:.80}, expected [storage, offset]"
                )
            number, first = place
            if number >= len(keys):
                raise ValueError(f"update_info: {tensor.name} is in storage {number} of {len(keys)}")
            base = bases.get((number, tensor.dtype))
            if base is None:
                base = torch.empty(0, dtype=tensor.dtype, device=self._device)
                base = bases[number, tensor.dtype] = base.set_(self._storages[keys[number]])
            end = first + math.prod(tensor.shape)
            if not 0 <= first <= end <= base.numel():
                raise ValueError(f"update_info: {tensor.name} lies outside of its storage")
            batch.append((tensor.name, base.as_strided(tensor.shape, _strides(tensor.shape), first)))
        return batch

    def _pickled(self, tensors: list[Announced], update_info: Mapping[str, Any]) -> Batch:
        text = update_info.get("ipc_handles_pickled")
        if not isinstance(text, str):
            raise ValueError("update_info: expected ipc_handles_pickled, the handles as a pickle in base64")
        handles = ipc_handles(base64.b64decode(text, validate=True))
        if isinstance(handles, dict):
            return self._unpack(tensors, handles)
        if isinstance(handles, list) and len(handles) == len(tensors):
            return [(tensor.name, self._mapped(tensor, each)) for tensor, each in zip(tensors, handles, strict=True)]
        raise ValueError(f"update_info: expected a handle for each of {len(tensors)} tensors, or one for all")

    def _unpack(self, tensors: list[Announced], handles: Mapping[Any, Any]) -> Batch:
        arguments = self._arguments(handles)
        if self._buffer is None or self._buffer[0] != arguments:
            self._buffer = arguments, _rebuild(arguments, self._device)
        buffer = self._buffer[1].flatten().view(torch.uint8)
        size = sum(tensor.nbytes for tensor in tensors)
        if buffer.numel() < size:
            raise ValueError(f"update_info: the buffer has {buffer.numel()} bytes, expected {size}")
        return unpacked(tensors, buffer[:size])

    def _mapped(self, tensor: Announced, handles: Any) -> Tensor:
        values = _rebuild(self._arguments(handles), self._device)
        if (tuple(values.shape), values.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"update_info: {tensor.name} is announced as {tensor.shape}, and comes as {values.shape}")
        return values

    def _arguments(self, handles: Any) -> tuple[Any, ...]:
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        if not isinstance(handles, dict) or not isinstance(arguments := handles.get(uuid), tuple):
            raise ValueError(f"update_info: there is no handle for this GPU, {uuid}: CUDA IPC works on one GPU only")
        return arguments

    def close(self) -> None:
        self._buffer, self._storages = None, {}


@functools.lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# What UntypedStorage._share_cuda_ returns after the device, in its order; bytes are in base64.
_SHARED: tuple[tuple[str, type], ...] = (
    ("handle", bytes),
    ("bytes", int),
    ("offset", int),
    ("counter", bytes),
    ("counter_offset", int),
    ("event", bytes),
    ("has_event", bool),
)


def storage_row(storage: torch.UntypedStorage) -> list[Any]:
    """Return a storage of this process as JSON values, for `_mapped_storage` in another."""
    device, *values = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return [uuid, *(base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in values)]


def _mapped_storage(row: Any, device: torch.device) -> torch.UntypedStorage:
    """Map a storage of another process. ValueError if the row is not one of `storage_row`, of this GPU."""
    if not isinstance(row, list) or len(row) != len(_SHARED) + 1:
        raise ValueError(f"ipc: a storage is {str(row)[:80]}, expected {len(_SHARED) + 1} values")
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if row[0] != uuid:
        raise ValueError(f"ipc: a storage lies on GPU {row[0]!r}, and this is {uuid}: CUDA IPC works on one GPU only")
    values = []
    for (name, kind), value in zip(_SHARED, row[1:], strict=True):
        value = base64.b64decode(value, validate=True) if kind is bytes and isinstance(value, str) else value
        if type(value) is not kind:
            raise ValueError(f"ipc: the {name} of a storage is {value!r:.80}, expected {kind.__name__}")
        values.append(value)
    return torch.UntypedStorage._new_shared_cuda(index, *values)  # type: ignore[no-any-return]


# The arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor, in its order, and their types.
_REBUILD: tuple[tuple[str, Any], ...] = (
    ("class", Named),
    ("size", tuple),
    ("stride", tuple),
    ("offset", int),
    ("storage", Named),
    ("dtype", Named),
    ("device", int),
    ("handle", bytes),
    ("storage_bytes", int),
    ("storage_offset", int),
    ("requires_grad", bool),
    ("counter", bytes),
    ("counter_offset", int),
    ("event", bytes),
    ("has_event", bool),
)


def _rebuild(arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    """Map a tensor of another process, from arguments that are data."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if len(arguments) != len(_REBUILD):
        raise ValueError(f"ipc: a handle has {len(arguments)} parts, expected {len(_REBUILD)}, as torch 2 has them")
    for (name, kind), value in zip(_REBUILD, arguments, strict=True):
        if not isinstance(value, kind) and not (name == "counter" and value is None):
            raise ValueError(f"ipc: the {name} of a handle is a {type(value).__name__}, expected a {kind.__name__}")
    values = dict(zip((name for name, _ in _REBUILD), arguments, strict=True))
    if values["dtype"].name not in DTYPES:
        raise ValueError(f"ipc: a handle has the dtype {values['dtype']}")
    index = torch.cuda.current_device() if device.index is None else device.index
    plain: Any = {"class": Tensor, "storage": torch.UntypedStorage, "dtype": getattr(torch, values["dtype"].name)}
    return rebuild_cuda_tensor(*(values | plain | {"device": index, "requires_grad": False}).values())
