"""The ways on which new weights come: over a group of processes, from memory that both can read, or from files.

Each has a class with `receive`, which yields named tensors on the engine's device, a few at a time, and `close`.
"""

from .tensors import Announced as Announced
from .tensors import Batch as Batch
from .tensors import TransferError as TransferError
from .tensors import announced as announced
