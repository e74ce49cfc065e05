"""Read what other programs have pickled, as data: nothing is imported and nothing is called.

Trainers that were made for vLLM send an NCCL id and tables of tensors as pickles. Python's own reader of them runs
whatever code a pickle names. This one knows numbers, texts, bytes, tuples, lists and dicts, and a few names, each with
a function of ours that builds plain data in place of the object; anything else is refused.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 20
MAX_OPCODES = 4_000_000
_MAX_DIGITS = 64
Name = tuple[str, str]  # module and name, as a pickle has them


class PickleRefused(ValueError):
    """The pickle has something that is not data, or is damaged."""


@dataclass(frozen=True, slots=True)
class Known:
    """A name that a pickle may have. build: makes plain data of the arguments with which it is called; None: the name
    itself is a value, and calling it is refused."""

    build: Callable[[tuple[Any, ...]], Any] | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A name of a pickle, as a value."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_MARK = object()


def load(data: bytes, known: Mapping[Name, Known]) -> Any:
    """Return the value of a pickle. known: the names that it may have, and what they stand for.

    Raises PickleRefused for anything else, such as another name, an object with attributes, a persistent id, a
    reference to itself, or more than 64 MiB.
    """
    if len(data) > MAX_BYTES:
        raise PickleRefused(f"pickle: {len(data)} bytes, expected at most {MAX_BYTES}")
    reader = _Reader(known)
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise PickleRefused(f"pickle: more than {MAX_OPCODES} operations")
            if opcode.name == "STOP":
                return reader.result(position is not None and position + 1 == len(data))
            if opcode.name == "FRAME" and argument > len(data):  # type: ignore[operator]
                raise PickleRefused("pickle: it ends in the middle of a frame")
            reader.step(opcode.name, argument)
    except PickleRefused:
        raise
    except Exception as error:  # whatever damaged bytes do to the disassembler or to the stack
        raise PickleRefused(f"pickle: it is damaged: {type(error).__name__}: {error}") from None
    raise PickleRefused("pickle: it ends in the middle")


# The argument of these is the value.
_VALUES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    }
)
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PLAIN = (int, float, str, bytes, tuple, type(None), Named)  # what a key of a dict may be


class _Reader:
    """The stack machine of pickles."""

    def __init__(self, known: Mapping[Name, Known]) -> None:
        self._known = known
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self, is_at_end: bool) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK or not is_at_end:
            raise PickleRefused("pickle: expected one value, and nothing after it")
        return self._stack[0]

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            if isinstance(argument, int) and argument.bit_length() > 4 * _MAX_DIGITS:
                raise PickleRefused("pickle: a number is too long")
            self._push(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif (handler := _HANDLERS.get(name)) is not None:
            handler(self, argument)
        else:
            raise PickleRefused(f"pickle: the operation {name} is refused: only plain data is read")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefused("pickle: it is damaged: a mark in place of a value")
        return value

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    # ---- operations

    def ignore(self, argument: Any) -> None:
        pass

    def mark(self, argument: Any) -> None:
        self._push(_MARK)

    def drop(self, argument: Any) -> None:
        self._stack.pop()

    def drop_to_mark(self, argument: Any) -> None:
        self._pop_to_mark()

    def repeat(self, argument: Any) -> None:
        value = self._pop()
        self._stack += [value, value]

    def put(self, argument: Any) -> None:
        value = self._stack[-1]
        if value is _MARK:
            raise PickleRefused("pickle: it is damaged: a mark is stored")
        self._memo[len(self._memo) if argument is None else argument] = value

    def get(self, argument: Any) -> None:
        self._push(self._memo[argument])

    def tuple_of(self, count: int) -> None:
        self._push(tuple([self._pop() for _ in range(count)][::-1]))

    def tuple_to_mark(self, argument: Any) -> None:
        self._push(tuple(self._pop_to_mark()))

    def empty_list(self, argument: Any) -> None:
        self._push([])

    def list_to_mark(self, argument: Any) -> None:
        self._push(self._pop_to_mark())

    def append(self, argument: Any) -> None:
        value = self._pop()
        self._extend([value])

    def appends(self, argument: Any) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleRefused("pickle: it is damaged: something is appended to what is not a list")
        if any(value is target for value in values):
            raise PickleRefused("pickle: a list that has itself as an entry")
        target += values

    def empty_dict(self, argument: Any) -> None:
        self._push({})

    def dict_to_mark(self, argument: Any) -> None:
        pairs = self._pop_to_mark()
        self._push({})
        self._set(pairs)

    def set_item(self, argument: Any) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def set_items(self, argument: Any) -> None:
        self._set(self._pop_to_mark())

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise PickleRefused("pickle: it is damaged: something is stored in what is not a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, _PLAIN):
                raise PickleRefused(f"pickle: a {type(key).__name__} is the key of a dict")
            if value is target:
                raise PickleRefused("pickle: a dict that has itself as a value")
            target[key] = value

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._name(module, name)

    def stack_name(self, argument: Any) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in self._known:
            known = ", ".join(sorted(".".join(known) for known in self._known)) or "none"
            raise PickleRefused(f"pickle: it names {str(module)[:64]}.{str(name)[:64]}, expected one of: {known}")
        self._push(Named(module, name))

    def call(self, argument: Any) -> None:
        arguments, function = self._pop(), self._pop()
        known = self._known.get((function.module, function.name)) if isinstance(function, Named) else None
        if known is None or known.build is None or not isinstance(arguments, tuple):
            raise PickleRefused(f"pickle: it calls {str(function)[:64]}: only plain data is read")
        self._push(known.build(arguments))


_HANDLERS: Mapping[str, Callable[[_Reader, Any], None]] = {
    "PROTO": _Reader.ignore,
    "FRAME": _Reader.ignore,
    "MARK": _Reader.mark,
    "POP": _Reader.drop,
    "POP_MARK": _Reader.drop_to_mark,
    "DUP": _Reader.repeat,
    "MEMOIZE": _Reader.put,
    "PUT": _Reader.put,
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "GET": _Reader.get,
    "BINGET": _Reader.get,
    "LONG_BINGET": _Reader.get,
    "TUPLE": _Reader.tuple_to_mark,
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "EMPTY_LIST": _Reader.empty_list,
    "LIST": _Reader.list_to_mark,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.appends,
    "EMPTY_DICT": _Reader.empty_dict,
    "DICT": _Reader.dict_to_mark,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "GLOBAL": _Reader.name,
    "STACK_GLOBAL": _Reader.stack_name,
    "REDUCE": _Reader.call,
}


# ---- what is known

_ID_BYTES = 128  # of an ncclUniqueId
_ID_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


def _unpickled_id(arguments: tuple[Any, ...]) -> bytes:
    """Return the bytes of an NCCL id: ctypes pickles it as a call with its type, and its attributes and bytes."""
    match arguments:
        case (Named(name="ncclUniqueId"), ({}, bytes(data))) if len(data) == _ID_BYTES:
            return data
    raise PickleRefused(f"pickle: expected an NCCL id of {_ID_BYTES} bytes")


def nccl_id(data: bytes) -> bytes:
    """Return the NCCL id that a vLLM trainer has put into the store."""
    known = {("_ctypes", "_unpickle"): Known(_unpickled_id), (_ID_MODULE, "ncclUniqueId"): Known()}
    value = load(data, known)
    if not isinstance(value, bytes) or len(value) != _ID_BYTES:
        raise PickleRefused(f"pickle: expected an NCCL id, found {type(value).__name__}")
    return value


DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int32",
    "int64",
)


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    match arguments:
        case (tuple(sizes),) if all(type(size) is int and size >= 0 for size in sizes):
            return sizes
    raise PickleRefused("pickle: expected the size of a tensor")


_TORCH_DATA = {("torch", dtype): Known() for dtype in DTYPES} | {("torch", "Size"): Known(_size)}


def tensor_table(data: bytes) -> list[tuple[str, list[tuple[str, tuple[int, ...], int]]]]:
    """Return a table {dtype: [(name, shape, number of values)]}, as prime-rl sends it, as pairs in its order."""
    table = load(data, _TORCH_DATA)
    if not isinstance(table, dict):
        raise PickleRefused(f"pickle: expected a table of tensors, found {type(table).__name__}")
    rows: list[tuple[str, list[tuple[str, tuple[int, ...], int]]]] = []
    for dtype, entries in table.items():
        if not isinstance(dtype, Named) or dtype.name not in DTYPES or not isinstance(entries, list):
            raise PickleRefused("pickle: expected lists of tensors by dtype")
        rows.append((dtype.name, [_row(entry) for entry in entries]))
    return rows


def _row(entry: Any) -> tuple[str, tuple[int, ...], int]:
    match entry:
        case (str(name), tuple(shape), int(count)) if all(type(size) is int and size >= 0 for size in shape):
            product = 1
            for size in shape:
                product *= size
            if product == count:
                return name, shape, count
    raise PickleRefused("pickle: expected the name, the shape and the number of values of a tensor")


# The classes in the arguments with which torch rebuilds a tensor of another process, as names.
_IPC_NAMES = {("torch", "Tensor"): Known(), ("torch.nn.parameter", "Parameter"): Known()}
_IPC_NAMES |= {("torch.storage", name): Known() for name in ("UntypedStorage", "TypedStorage")}


def ipc_handles(data: bytes) -> Any:
    """Return CUDA IPC handles: lists and dicts of the arguments with which torch rebuilds a tensor."""
    return load(data, _TORCH_DATA | _IPC_NAMES)
