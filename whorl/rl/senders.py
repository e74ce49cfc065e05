"""How a trainer sends weights: through memory of its machine, or as rank 0 of a group over gloo."""

import contextlib
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, distributed
from torch.multiprocessing.reductions import StorageWeakRef

from .transfers.group import broadcast
from .transfers.memory import storage_row

Transfer = Literal["shm", "ipc", "gloo"]
_MOST_BYTES = 1 << 28


class Sender(Protocol):
    """One way of sending. init_info: what the server must know first; most_bytes: of one batch."""

    init_info: dict[str, Any]
    most_bytes: int

    def join(self) -> None:
        """Meet the server, while it handles `init_info`."""

    def prepare(self, batch: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Take tensors to be sent; return what the announcement says beside their names."""

    def send(self) -> None:
        """Send them, while the server handles the announcement."""

    def close(self) -> None: ...


def make_sender(transfer: Transfer, seconds: float) -> Sender:
    """Return the sender of a transfer. seconds: how long one that meets the server waits for it."""
    if transfer == "gloo":
        return GlooSender(seconds)
    return SharedMemorySender() if transfer == "shm" else IpcSender()


def announcement(batch: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return what the server must know of tensors before they come."""
    return {
        "names": [name for name, _ in batch],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in batch],
        "shapes": [list(tensor.shape) for _, tensor in batch],
    }


class SharedMemorySender:
    """Copies tensors to shared memory, which grows with the largest batch."""

    init_info: dict[str, Any]
    most_bytes = _MOST_BYTES

    def __init__(self) -> None:
        self.init_info = {}
        self._memory: SharedMemory | None = None

    def join(self) -> None:
        pass

    def prepare(self, batch: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        size = sum(tensor.nbytes for _, tensor in batch)
        if self._memory is None or self._memory.size < size:
            self.close()
            self._memory = SharedMemory(f"whorl-{uuid.uuid4().hex}", create=True, size=max(1, size))
        buffer = torch.frombuffer(self._memory.buf, dtype=torch.uint8)
        first = 0
        for _, tensor in batch:
            buffer[first : first + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            first += tensor.nbytes
        return {"shm": self._memory.name.lstrip("/")}

    def send(self) -> None:
        pass

    def close(self) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.unlink()
            with contextlib.suppress(BufferError):  # a tensor still looks at it; the memory goes with the tensor
                memory.close()


class IpcSender:
    """Lets the server read the memory of this process's GPU; the server must run on the same GPU."""

    init_info: dict[str, Any]
    most_bytes = 1 << 62  # nothing is copied

    def __init__(self) -> None:
        self.init_info = {}
        self._rows: dict[int, tuple[StorageWeakRef, list[Any]]] = {}  # of storages that were shared, by address
        self._batch: list[Tensor] = []

    def join(self) -> None:
        pass

    def prepare(self, batch: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        self._batch = [tensor.contiguous() for _, tensor in batch]
        rows: dict[int, list[Any]] = {}
        numbers: dict[int, int] = {}
        places = []
        for tensor in self._batch:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in rows:
                numbers[address], rows[address] = len(rows), self._row(address, storage)
            places.append((numbers[address], tensor.storage_offset()))
        self._rows = {address: pair for address, pair in self._rows.items() if address in rows}
        torch.cuda.synchronize()  # the values are there when the server reads them
        return {"ipc_storages": list(rows.values()), "ipc_places": places}

    def _row(self, address: int, storage: torch.UntypedStorage) -> list[Any]:
        """Return what names a storage. It stays the same while the storage lives, so that it is mapped once."""
        known = self._rows.get(address)
        if known is None or known[0].expired() or known[1][2] != storage.nbytes():
            known = self._rows[address] = StorageWeakRef(storage), storage_row(storage)
        return known[1]

    def send(self) -> None:
        pass

    def close(self) -> None:
        self._rows, self._batch = {}, []


class GlooSender:
    """Rank 0 of a group with the server. host: the address of this machine that the server can reach."""

    init_info: dict[str, Any]
    most_bytes = _MOST_BYTES

    def __init__(self, seconds: float, host: str = "127.0.0.1", num_servers: int = 1) -> None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        self._wait, self._size = timedelta(seconds=seconds), num_servers + 1
        self._store = distributed.TCPStore(
            host, port, self._size, is_master=True, timeout=self._wait, wait_for_workers=False, use_libuv=False
        )
        self.init_info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": self._size}
        self._group: Any = None
        self._batch: list[Tensor] = []

    def join(self) -> None:
        store = distributed.PrefixStore("gloo", self._store)
        self._group = distributed.ProcessGroupGloo(store, 0, self._size, self._wait)

    def prepare(self, batch: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        self._batch = [tensor.cpu().contiguous() for _, tensor in batch]
        return {"packed": False}

    def send(self) -> None:
        for tensor in self._batch:
            broadcast(self._group, tensor)
        self._batch = []

    def close(self) -> None:
        self._group = None
