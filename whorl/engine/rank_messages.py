"""The messages that rank 0 sends to the other ranks: a name, arguments as JSON, and for a call the bytes of its arrays.

They go over the host, in the control group.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import distributed

from .batch_images import Insert
from .call import Call, field_offsets, field_views
from .host_blocks import Carry, FileMove
from .launch import Rank
from .states import Move

_NO_BYTES = np.zeros(0, dtype=np.uint8)


def send(group: Rank, name: str, *arguments: Any, packed: np.ndarray = _NO_BYTES) -> None:
    """Broadcast a message: its lengths, then the bytes of `packed` and the JSON of name and arguments."""
    text = np.frombuffer(json.dumps([name, *arguments], default=int).encode(), dtype=np.uint8)
    distributed.broadcast(torch.tensor([len(packed), len(text)]), 0, group=group.control)
    distributed.broadcast(torch.from_numpy(np.concatenate([packed, text])), 0, group=group.control)


def receive(rank: Rank) -> tuple[str, list[Any], np.ndarray]:
    """Return the name, the arguments and the bytes of the next message."""
    lengths = torch.zeros(2, dtype=torch.int64)
    distributed.broadcast(lengths, 0, group=rank.control)
    num_bytes, num_letters = lengths.tolist()
    message = torch.empty(num_bytes + num_letters, dtype=torch.uint8)
    distributed.broadcast(message, 0, group=rank.control)
    name, *arguments = json.loads(message[num_bytes:].numpy().tobytes())
    return name, arguments, message[:num_bytes].numpy()


def exchange(rank: Rank, text: str) -> list[str]:
    """Return the texts of all ranks, in order of rank. Every rank must call this at the same time."""
    texts = []
    for source in range(rank.size):
        data = torch.tensor(list(text.encode()) if source == rank.rank else [], dtype=torch.uint8)
        length = torch.tensor([len(data)])
        distributed.broadcast(length, source, group=rank.control)
        if source != rank.rank:
            data = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(data, source, group=rank.control)
        texts.append(data.numpy().tobytes().decode())
    return texts


def send_call(group: Rank, name: str, call: Call) -> None:
    """Send a call."""
    packed = np.zeros(field_offsets(call.size)[1], dtype=np.uint8)
    call.write(field_views(packed, call.size), {})
    if call.axes is not None:
        axes = np.ascontiguousarray(call.axes, dtype=np.int64)
        packed = np.concatenate([packed, axes.reshape(-1).view(np.uint8)])
    more = call.num_prompts, call.num_keys, call.is_eager, call.is_adapted, call.tables, call.inserts, call.moves
    send(group, name, call.size, *more, packed=packed)


def unpacked_call(arguments: list[Any], packed: np.ndarray) -> Call:
    """Return the call of a message that `send_call` has sent."""
    size, num_prompts, num_keys, is_eager, is_adapted, tables, inserts, moves = arguments
    size = tuple(size)
    arrays: Any = field_views(packed, size)
    call = Call(num_prompts, arrays, num_keys, tables, is_eager=is_eager, is_adapted=is_adapted)
    if len(axes := packed[field_offsets(size)[1] :]):
        call.axes = axes.view(np.int64).reshape(-1, size[0])
    call.inserts = [Insert(*row) for row in inserts]
    call.moves = unpacked_moves(moves)
    return call


def unpacked_moves(rows: list[list[Any]]) -> list[Move | Carry | FileMove]:
    """Return the moves of a message. Their kinds differ in the number of fields."""
    kinds = {len(kind._fields): kind for kind in (Move, Carry, FileMove)}
    return [kinds[len(row)](*row) for row in rows]
