"""The four functions of NCCL that receive weights, called in the library that torch has loaded."""

import ctypes
import time
from typing import Any

import torch
from torch import Tensor

from .tensors import TransferError

_UINT8, _FLOAT32, _SUM = 1, 7, 0
_IN_PROGRESS = 7
_POLL_SECONDS = 0.0005


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def _library() -> Any:
    for name in ("libnccl.so.2", "libnccl.so"):
        try:
            library = ctypes.CDLL(name)  # torch has loaded it, so that the loader finds it by its name
        except OSError:
            continue
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
        buffers: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        library.ncclBroadcast.argtypes = library.ncclAllReduce.argtypes = [*buffers, ctypes.c_void_p, ctypes.c_void_p]
        library.ncclCommAbort.argtypes = [ctypes.c_void_p]
        return library
    raise TransferError("nccl: the library libnccl.so.2 is not loaded; use the backend ipc, shm or gloo")


class Communicator:
    """A communicator that follows vLLM's handshake: joined by an id, then one all-reduce of one number."""

    def __init__(self, unique_id: bytes, rank: int, size: int, device: torch.device, seconds: float) -> None:
        self._library, self._device, self._seconds = _library(), device, seconds
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            joined = self._library.ncclCommInitRank(
                ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(unique_id), rank
            )
            self._check(joined)
            number = torch.zeros(1, device=device)
            at = ctypes.c_void_p(number.data_ptr())
            self._check(self._library.ncclAllReduce(at, at, 1, _FLOAT32, _SUM, self._handle, self._stream()))
            self._wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor with what rank 0 sends."""
        at = ctypes.c_void_p(tensor.data_ptr())
        with torch.cuda.device(self._device):
            sent = self._library.ncclBroadcast(at, at, tensor.nbytes, _UINT8, 0, self._handle, self._stream())
            self._check(sent)
            self._wait()

    def close(self) -> None:
        if self._handle:
            self._library.ncclCommAbort(self._handle)
            self._handle = ctypes.c_void_p()

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _check(self, status: int) -> None:
        if status not in (0, _IN_PROGRESS):
            raise TransferError(f"nccl: {self._library.ncclGetErrorString(status).decode()}")

    def _wait(self) -> None:
        """Wait for the stream; NCCL itself would wait for ever for a sender that is gone."""
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + self._seconds
        while not done.query():
            if time.monotonic() > end:
                self.close()
                raise TransferError(f"nccl: nothing came for {self._seconds:g} seconds: is the sender gone?")
            time.sleep(_POLL_SECONDS)
