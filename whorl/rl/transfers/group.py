"""A group of processes of which the trainer is rank 0: NCCL between GPUs, gloo on CPUs. Only broadcasts are used.

The processes find each other through a TCP store that the trainer serves. For NCCL the trainer puts the id of the
communicator into it as vLLM does, so that trainers which know vLLM need no change.
"""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from whorl.rl.pickles import nccl_id

from .tensors import Announced, Batch, TransferError, announced, chunks, unpacked

ID_KEY = "broadcast_from/0/0"  # where vLLM's trainers put the id
PACKED_BYTES = 1 << 30
_LEAST_PORT, _MOST_PORT = 1, 65535


class Wire(Protocol):
    """The broadcasts of a group."""

    device: torch.device

    def receive(self, tensor: Tensor) -> None:
        """Fill the tensor with what rank 0 sends; TransferError if it does not come."""

    def close(self) -> None: ...


class GroupInfo:
    """Where a group meets: the fields of vLLM's `init_info`. ValueError for wrong ones.

    A server is one member, whatever its tensor parallel degree: its rank 0 sends the tensors on.
    """

    def __init__(self, info: Mapping[str, Any], *, seconds: float) -> None:
        self.host = _field(info, "master_address", str)
        self.port = _field(info, "master_port", int)
        self.size = _field(info, "world_size", int)
        self.rank = _field(info, "rank_offset", int)
        self.packed = bool(info.get("packed", False))
        self.packed_bytes = info.get("packed_buffer_size_bytes", PACKED_BYTES)
        self.seconds = seconds
        if not _LEAST_PORT <= self.port <= _MOST_PORT:
            raise ValueError(f"init_info: master_port is {self.port}, expected 1 to 65535")
        if not 1 <= self.rank < self.size:
            raise ValueError(
                f"init_info: rank_offset makes this rank {self.rank} of world_size {self.size}: the trainer is rank 0, "
                "and each server is one more, with --tp as well"
            )
        if type(self.packed_bytes) is not int or self.packed_bytes < 1:
            raise ValueError(
                f"init_info: packed_buffer_size_bytes is {self.packed_bytes!r}, expected a number of bytes"
            )

    def store(self) -> distributed.TCPStore:
        """Connect to the trainer's store; TransferError if it is not there."""
        wait = timedelta(seconds=self.seconds)
        try:
            return distributed.TCPStore(
                self.host, self.port, self.size, is_master=False, timeout=wait, wait_for_workers=False, use_libuv=False
            )
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"no trainer answers at {self.host}:{self.port}: {_first_line(error)}") from None


def _field(info: Mapping[str, Any], name: str, kind: type) -> Any:
    value = info.get(name)
    if type(value) is not kind:
        raise ValueError(f"init_info: {name} is {value!r}, expected {'a name' if kind is str else 'a whole number'}")
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class GlooWire:
    """Broadcasts between CPUs."""

    device = torch.device("cpu")

    def __init__(self, info: GroupInfo) -> None:
        wait = timedelta(seconds=info.seconds)
        store = distributed.PrefixStore("gloo", info.store())
        try:
            self._group: Any = distributed.ProcessGroupGloo(store, info.rank, info.size, wait)
        except RuntimeError as error:
            raise TransferError(f"the group did not form: {_first_line(error)}") from None

    def receive(self, tensor: Tensor) -> None:
        broadcast(self._group, tensor)

    def close(self) -> None:
        self._group = None


def broadcast(group: Any, tensor: Tensor) -> None:
    """Broadcast from rank 0 of a group that is not torch's default one."""
    options = distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    try:
        group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raise TransferError(f"the sender is gone, or sent something else: {_first_line(error)}") from None


class NcclWire:
    """Broadcasts between GPUs, by NCCL itself: torch's groups exchange more than an id."""

    def __init__(self, info: GroupInfo, device: torch.device) -> None:
        from .nccl import Communicator

        self.device = device
        store = info.store()
        try:
            store.wait([ID_KEY], timedelta(seconds=info.seconds))
            unique_id = nccl_id(store.get(ID_KEY))
        except RuntimeError as error:
            raise TransferError(f"the trainer has put no NCCL id into its store: {_first_line(error)}") from None
        self._communicator = Communicator(unique_id, info.rank, info.size, device, info.seconds)

    def receive(self, tensor: Tensor) -> None:
        self._communicator.broadcast(tensor)

    def close(self) -> None:
        self._communicator.close()


class GroupTransfer:
    """Tensors that rank 0 of a group broadcasts, each by itself or packed into buffers, as vLLM has it."""

    def __init__(self, wire: Wire, *, packed: bool, packed_bytes: int) -> None:
        self.wire, self.packed, self.packed_bytes = wire, packed, packed_bytes

    def receive(self, update_info: Mapping[str, Any]) -> Iterator[Batch]:
        tensors = announced(update_info)
        packed = update_info.get("packed", self.packed)  # before vLLM 0.28 it came with each update
        if not packed:
            for tensor in tensors:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.wire.device)
                self.wire.receive(values)
                yield [(tensor.name, values)]
            return
        yield from self._packed(tensors)

    def _packed(self, tensors: list[Announced]) -> Iterator[Batch]:
        for chunk in chunks(tensors, self.packed_bytes):
            size = sum(tensor.nbytes for tensor in chunk)
            buffer = torch.empty(size, dtype=torch.uint8, device=self.wire.device)
            self.wire.receive(buffer)
            yield unpacked(chunk, buffer)

    def close(self) -> None:
        self.wire.close()
