"""The messages that rank 0 sends to the other ranks: a header of a few numbers and, for a call, its arrays.

They go over the host, in the control group.
"""

from typing import Any

import numpy as np
import torch
from torch import distributed

from .batch_images import Insert
from .call import Call, field_offsets
from .launch import Rank
from .states import Move

# Kinds of messages from rank 0. DRAFT: a call of the draft head; PUT: last tokens of its lanes.
STOP, CALL, LOGITS, DROP, ENCODE, DRAFT, PUT = range(7)
HEADER = 11  # numbers in a message header: the kind of message, and up to ten arguments
_INSERT, _MOVE = len(Insert._fields), len(Move._fields)


def send(group: Rank, *header: int) -> None:
    """Broadcast a message header, padded with zeros: the kind of message, then its arguments."""
    distributed.broadcast(torch.tensor([*header, *[0] * (HEADER - len(header))]), 0, group=group.control)


def send_call(group: Rank, kind: int, call: Call) -> None:
    """Send a call. kind: CALL or DRAFT."""
    arrays, tables = _pack(call)
    axes = np.zeros((0, 0), dtype=np.int64) if call.axes is None else np.ascontiguousarray(call.axes)
    inserts = np.array(call.inserts, dtype=np.int64).reshape(-1, _INSERT)
    moves = np.array(call.moves, dtype=np.int64).reshape(-1, _MOVE)
    counts = (len(axes), len(inserts), len(moves), len(tables))
    send(group, kind, *call.size, call.num_keys, call.num_prompts, call.is_eager, *counts)
    numbers = (array.reshape(-1).view(np.uint8) for array in (axes, inserts, moves, tables))
    distributed.broadcast(torch.from_numpy(np.concatenate([arrays, *numbers])), 0, group=group.control)


def receive_call(rank: Rank, num_tokens: int, entries: int, samples: int, *arguments: int) -> Call:
    """Receive the call that a message header announces. arguments: as `_unpack` takes them."""
    size = num_tokens, entries, samples
    num_bytes = field_offsets(size)[1]
    packed = torch.empty(num_bytes + -num_bytes % 8 + 8 * _num_extra(num_tokens, *arguments[3:]), dtype=torch.uint8)
    distributed.broadcast(packed, 0, group=rank.control)
    return _unpack(packed.numpy(), size, *arguments)


def _pack(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a call's arrays, padded to a multiple of 8, and its new block tables in one array of int64:
    the lane, the length and the blocks of each."""
    num_bytes = field_offsets(call.size)[1]
    packed = np.zeros(num_bytes + -num_bytes % 8, dtype=np.uint8)
    call.write(_views(packed, call.size), {})
    tables = [number for lane, blocks in call.tables for number in (lane, len(blocks), *blocks)]
    return packed, np.array(tables, dtype=np.int64)


def _unpack(
    packed: np.ndarray, size: tuple[int, int, int], num_keys: int, num_prompts: int, is_eager: int, *counts: int
) -> Call:
    """Rebuild the call. counts: axes of positions, inserted runs of image features, moves of states, and numbers in the
    block tables."""
    num_axes, num_inserts, num_moves, num_tables = counts
    numbers = packed[len(packed) - 8 * _num_extra(size[0], *counts) :].view(np.int64)
    first_move = len(numbers) - num_tables - _MOVE * num_moves
    axes, inserts, moves, table_numbers = np.split(numbers, (num_axes * size[0], first_move, len(numbers) - num_tables))
    tables, unread = [], table_numbers.tolist()
    while unread:
        lane, count, *unread = unread
        tables.append((lane, unread[:count]))
        unread = unread[count:]
    arrays: Any = _views(packed, size)
    call = Call(num_prompts, arrays, num_keys, tables, is_eager=bool(is_eager))
    call.axes = axes.reshape(num_axes, size[0]) if num_axes else None
    call.inserts = [Insert(*row) for row in inserts.reshape(num_inserts, _INSERT).tolist()]
    call.moves = [Move(lane, at, bool(saved)) for lane, at, saved in moves.reshape(num_moves, _MOVE).tolist()]
    return call


def _num_extra(num_tokens: int, num_axes: int, num_inserts: int, num_moves: int, num_tables: int) -> int:
    """Return how many numbers of eight bytes follow a call's arrays."""
    return num_axes * num_tokens + num_inserts * _INSERT + num_moves * _MOVE + num_tables


def _views(packed: np.ndarray, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
    return {
        name: packed[start : start + int(kind[1]) * count].view(kind)
        for name, kind, start, count in field_offsets(size)[0]
    }
