"""An NPU of paper: tensors say that they are on npu:0, their numbers lie on the host, and arithmetic is the CPU's.

Whoever asks for a tensor's device, mixes devices, pins memory, waits for a stream or records a graph meets what an NPU
would show. torch_npu's operators are called through their real schemas; behind them stand plain-torch kernels, which
refuse what the vendor documents that the device refuses. What differs from a device is the arithmetic and that
everything is done at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from whorl.ops import _op
from whorl.ops._torch_npu import BATCH_INVARIANT

NPU = torch.device("npu:0")
Kernels = Mapping[str, Callable[..., Any]]


class NpuTensor(Tensor):
    """Views share the host's memory as they would the device's."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "NpuTensor":
        where = {"strides": data.stride(), "storage_offset": data.storage_offset(), "dtype": data.dtype}
        with torch.inference_mode(False):  # a view of a tensor that was made before the mode could not be one
            made = torch.Tensor._make_wrapper_subclass(cls, data.shape, **where, device=NPU)
        made.data_ = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on an NPU tensor while there is no NPU")

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses for a subclass

    def __repr__(self) -> str:
        return f"NpuTensor({self.data_!r})"


class Npu(TorchDispatchMode):
    """While it is on, there is an NPU. `called` counts torch_npu's operators, `num_reads` copies to the host."""

    copies = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.called, self.num_reads = kernels, Counter[str](), 0
        self.pinned: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        mine = [x for x in tensors if isinstance(x, NpuTensor)]
        device = kwargs.get("device")
        if kwargs.pop("pin_memory", None) or func._schema.name == "aten::pin_memory":
            assert not mine, f"{func} pins memory of npu:0"
            return self._pin(func, args, kwargs)
        is_there = bool(mine) if device is None else torch.device(device).type == "npu"
        self._refuse_mixed(func, tensors, mine)
        self._refuse_pageable(func, args, kwargs)
        if device is not None and is_there:
            kwargs["device"] = "cpu"
        if (mine and not is_there) or func is torch.ops.aten._local_scalar_dense.default:
            self.num_reads += bool(mine)
        out = self._run(func, *tree_map_only(NpuTensor, lambda x: x.data_, (args, kwargs)))
        return self._wrap(func, args, out) if is_there else out

    def _refuse_mixed(self, func: Any, tensors: list[Tensor], mine: list[Tensor]) -> None:
        """As a device does; copies go between devices, and a number of the host may be mixed with anything."""
        if not mine or func in self.copies:
            return
        strange = [x for x in tensors if not isinstance(x, NpuTensor) and x.dim()]
        assert not strange, f"{func}: tensors on npu:0 and on {strange[0].device}"

    def _refuse_pageable(self, func: Any, args: Any, kwargs: Any) -> None:
        """A copy that the host does not wait for reads its source when the source may be gone."""
        source = args[-1 if len(args) < 3 else 1] if func in self.copies else None
        if source is None or isinstance(source, NpuTensor) or not (kwargs.get("non_blocking") or args[2:] == (True,)):
            return
        where = source.untyped_storage().data_ptr()
        assert any(x.untyped_storage().data_ptr() == where for x in self.pinned), "a copy that nobody waits for"

    def _pin(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        self.pinned.append(args[0].clone() if func._schema.name == "aten::pin_memory" else func(*args, **kwargs))
        return self.pinned[-1]

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in ("npu", BATCH_INVARIANT):
            name = func._schema.name.split("::")[1]
            self.called[name] += 1
            return self.kernels[name](*args, **kwargs)
        return func(*args, **kwargs)

    def _wrap(self, func: Any, args: Any, out: Any) -> Any:
        if func._schema.is_mutable and out is not None:
            return args[0]
        return tree_map_only(Tensor, lambda x: x if isinstance(x, NpuTensor) else NpuTensor(x), out)


class Event:
    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class NPUGraph:
    """NPU graphs exist. What reads lengths back to the host must not be recorded in one."""

    def __init__(self) -> None:
        raise AssertionError("a graph was recorded on an NPU")


def no_graphs() -> None:
    raise AssertionError("memory for graphs was asked for on an NPU")


# What whorl.device asks of torch.npu, and what torch itself asks before it makes a tensor there.
RUNTIME: dict[str, Any] = {
    "Event": Event,
    "NPUGraph": NPUGraph,
    "graph_pool_handle": no_graphs,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "synchronize": lambda: None,
    "mem_get_info": lambda: (64 << 20, 64 << 20),
    "_lazy_init": lambda: None,
}


@contextmanager
def there_is_an_npu(kernels: Kernels) -> Iterator[Npu]:
    needs_node, lifted = _op.needs_node, torch._C._only_lift_cpu_tensors()
    runtime = {name: getattr(torch.npu, name) for name in RUNTIME}
    # The mode stands for the device: it is not somebody who looks on, as a tracer does.
    _op.needs_node = lambda tensors: False
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device="npu") is a copy from the host
    vars(torch.npu).update(RUNTIME)
    try:
        with Npu(kernels) as npu:
            yield npu
    finally:
        _op.needs_node = needs_node
        torch._C._set_only_lift_cpu_tensors(lifted)
        vars(torch.npu).update(runtime)
