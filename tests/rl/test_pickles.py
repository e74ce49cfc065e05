"""Pickles are read as data: those of trainers give their values, and 200 hostile ones give nothing but a refusal."""

import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import operator
import os
import pathlib
import pickle
import random
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from whorl.rl.pickles import Known, Named, PickleRefused, ipc_handles, load, nccl_id, tensor_table

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
DATA: list[Any] = [
    0,
    -1,
    2**40,
    2**70,
    1.5,
    "text",
    "",
    b"bytes" * 100,
    None,
    True,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1, [2, [3]]],
    {},
    {"a": 1, 2: (3, [4]), b"k": None},
    {"nested": [{"deep": ({"er": [1]},)}]},
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_data(protocol: int) -> None:
    for value in DATA:
        if (protocol < 3 and b"bytes" in repr(value).encode()) or (protocol < 3 and isinstance(value, dict) and value):
            continue  # before protocol 3 bytes are pickled as a call of a codec, which is refused
        assert load(pickle.dumps(value, protocol), {}) == value
    shared = [1, 2]
    assert load(pickle.dumps([shared, shared], protocol), {}) == [[1, 2], [1, 2]]


def nccl_class() -> Any:
    """The type that vLLM pickles, under its name."""
    module = types.ModuleType("vllm.distributed.device_communicators.pynccl_wrapper")

    class ncclUniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = module.__name__, "ncclUniqueId"
    module.ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_nccl_id_of_vllm(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nccl_class()
    names = module.__name__.split(".")
    for end in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), types.ModuleType(".".join(names[:end])))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    expected = bytes(range(128))
    data = pickle.dumps(module.ncclUniqueId.from_buffer_copy(expected), protocol)
    if protocol == 2:  # bytes come as a call of a codec
        with pytest.raises(PickleRefused, match="codecs"):
            nccl_id(data)
        return
    assert nccl_id(data) == expected
    with pytest.raises(PickleRefused, match="expected an NCCL id, found str"):
        nccl_id(pickle.dumps("no id"))
    monkeypatch.delitem(sys.modules, module.__name__)  # nothing was imported to read it
    assert nccl_id(data) == expected


def test_the_table_of_prime_rl() -> None:
    table = {torch.bfloat16: [("a.weight", torch.Size([2, 3]), 6)], torch.float32: [("b", torch.Size([]), 1)]}
    assert tensor_table(pickle.dumps(table)) == [("bfloat16", [("a.weight", (2, 3), 6)]), ("float32", [("b", (), 1)])]
    for wrong in (
        {torch.bfloat16: [("a", torch.Size([2, 3]), 7)]},
        {torch.bfloat16: [("a", [2, 3], 6)]},
        {"bfloat16": []},
        [],
        {torch.complex64: []},
    ):
        with pytest.raises(PickleRefused):
            tensor_table(pickle.dumps(wrong))


def test_handles_of_cuda_ipc() -> None:
    one = (torch.Tensor, torch.Size([2]), (1,), 0, torch.UntypedStorage, torch.bfloat16, 0, b"h" * 66, 512, 0, False)
    handles = {"uuid": (*one, b"counter", 0, b"event", True)}
    read = ipc_handles(pickle.dumps(handles))["uuid"]
    assert (read[0], read[1]) == (Named("torch", "Tensor"), (2,))
    assert str(read[5]) == "torch.bfloat16"
    assert read[7:] == handles["uuid"][7:]


# ---- hostile ones


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class Plain:
    def __init__(self) -> None:
        self.attribute = 1


class WithState:
    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("it ran")


CANARY = "/tmp/whorl-canary"
FUNCTIONS: list[Any] = [
    Calls(os.system, f"touch {CANARY}"),
    Calls(eval, f"open({CANARY!r}, 'w')"),
    Calls(exec, f"open({CANARY!r}, 'w')"),
    Calls(open, CANARY, "w"),
    Calls(subprocess.Popen, ["touch", CANARY]),
    Calls(subprocess.check_call, ["touch", CANARY]),
    Calls(builtins.__import__, "os"),
    Calls(getattr, os, "system"),
    Calls(operator.attrgetter("system"), None),
    Calls(functools.partial, os.system, f"touch {CANARY}"),
    Calls(pathlib.Path, CANARY),
    Calls(io.FileIO, CANARY, "w"),
    Calls(bytearray, 10**9),
    Calls(list, range(3)),
    Calls(collections.OrderedDict),
    Calls(datetime.datetime, b"\x07\xea\x0b\x13\x00\x00\x00\x00\x00\x00"),
    Calls(decimal.Decimal, "1"),
    Calls(fractions.Fraction, 1, 2),
    Calls(torch.load, CANARY),
    Calls(pickle.loads, pickle.dumps(1)),
    Calls(compile, "1", "", "eval"),
    Calls(type, "T", (), {}),
    Calls(object),
    Calls(os._exit, 3),
    Calls(sys.exit, 3),
    Plain(),
    WithState(),
    Plain,
    Calls,
    os.system,
    eval,
    {1, 2},
    frozenset([1]),
    1j,
    range(3),
    slice(1),
    bytearray(b"x"),
    collections.deque([1]),
    datetime.date(2026, 1, 1),
    Calls(Plain, state={"attribute": 2}),
]


def raw() -> list[bytes]:
    """Streams that no pickler writes."""
    import_os = b"cos\nsystem\n"
    return [
        b"",
        b".",
        b"N",
        b"\x80\x05.",
        b"NN.",
        b"N.N.",
        b"(.",
        b"0.",
        b"2.",
        b"t.",
        b"h\x00.",
        b"g5\n.",
        b"]h\x00.",
        import_os + b"(S'true'\ntR.",
        import_os + b"\x8c\x04true\x85R.",
        b"(" + b"ios\nsystem\n" + b".",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        import_os + b")\x81.",
        import_os + b")}\x92.",
        b"\x8c\x02os\x8c\x06system\x93.",
        b"Pid\n.",
        b"NQ.",
        b"\x82\x01.",
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"}}b.",
        b"]N\x8c\x01ab.",
        b"\x97.",
        b"\x98.",
        b"NN\x94R.",
        b"N)R.",
        b"](h\x00e.",
        b"]\x94h\x00a.",
        b"}\x94Nh\x00s.",
        b"}](Nu.",
        b"}]Ns.",
        b"}}Ns.",
        b"\x8f.",
        b"(\x91.",
        b"\x8f(K\x01\x90.",
        b"\x8a\xff" + b"\x01" * 255 + b".",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x8b\xff\xff\xff\x7f.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"B\xff\xff\xff\x7f.",
        b"C\xffx.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"\xff.",
        b"\x00.",
        b"X\x02\x00\x00\x00\xff\xff.",
        b"cwhorl.rl.pickles\nload\n.",
        b"cbuiltins\ngetattr\n(cos\nS'system'\ntR.",
        b"c_ctypes\n_unpickle\n(cos\nsystem\n}C\x01xttR.",
        b"c_ctypes\n_unpickle\n)R.",
    ]


def hostile() -> list[tuple[str, bytes]]:
    """At least 200 pickles: calls and objects at every protocol and in every container, damaged streams, and noise."""
    pickles: list[tuple[str, bytes]] = [(f"raw {i}", data) for i, data in enumerate(raw())]
    for i, value in enumerate(FUNCTIONS):
        for protocol in (0, 2, 4):
            try:
                pickles.append((f"call {i} at {protocol}", pickle.dumps(value, protocol)))
            except (TypeError, pickle.PicklingError):
                continue
        with contextlib.suppress(TypeError, pickle.PicklingError):
            pickles.append((f"call {i} inside", pickle.dumps([{"a": (value,)}])))
    good, rng = pickle.dumps(DATA), random.Random(0)
    pickles += [(f"cut {end}", good[:end]) for end in rng.sample(range(1, len(good) - 1), 20)]
    return pickles


HOSTILE = hostile()


def test_hostile_pickles_are_refused() -> None:
    assert len(HOSTILE) >= 200
    pathlib.Path(CANARY).unlink(missing_ok=True)
    modules = set(sys.modules)
    for name, data in HOSTILE:
        for read in (nccl_id, tensor_table, ipc_handles, lambda data: load(data, {})):
            try:
                value = read(data)
            except PickleRefused:  # and nothing else: no other error, no exit, no side effect
                continue
            pytest.fail(f"{name} was read as {value!r:.80}")
    assert not pathlib.Path(CANARY).exists()
    assert set(sys.modules) == modules


def test_noise_gives_data_or_a_refusal() -> None:
    rng = random.Random(1)
    good = [pickle.dumps(value, protocol) for value in DATA for protocol in (0, 2, 4, 5)]
    for _ in range(3000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            load(bytes(data), {})
        except PickleRefused:
            continue


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.rl import pickles

    monkeypatch.setattr(pickles, "MAX_OPCODES", 100)
    with pytest.raises(PickleRefused, match="more than 100 operations"):
        load(pickle.dumps(list(range(200))), {})
    monkeypatch.setattr(pickles, "MAX_BYTES", 100)
    with pytest.raises(PickleRefused, match="expected at most 100"):
        load(pickle.dumps(list(range(200))), {})


def test_a_known_name_is_built_by_our_function_only() -> None:
    known = {("os", "system"): Known(lambda arguments: ("ours", *arguments))}

    data = b"cos\nsystem\n(S'x'\ntR."
    assert load(data, known) == ("ours", "x")
