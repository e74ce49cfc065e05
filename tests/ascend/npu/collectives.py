"""The products fused with a collective, on FakeTensor npu:0 over torch_npu's own meta kernels."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from samples import Values, tensor

from whorl.passes import fused

WORLD, T, K, N = 4, 1024, 512, 768
CALLS: dict[str, tuple[Callable[[], Any], list[tuple[int, int]]]] = {
    "npu_reduce_scatter": (
        lambda: [fused.npu_reduce_scatter(tensor(T, K), tensor(K, N), "hcom", WORLD)],
        [(T // WORLD, N)],
    ),
    "npu_all_gather": (
        lambda: fused.npu_all_gather(tensor(T // WORLD, K), [tensor(K, N), tensor(K, 256)], "hcom", WORLD),
        [(T, K), (T, N), (T, 256)],
    ),
    "npu_all_reduce": (lambda: [fused.npu_all_reduce(tensor(T, K), tensor(K, N), "hcom")], [(T, N)]),
}


def on_fake(fake_npu: Callable[[], AbstractContextManager[None]]) -> Iterator[Values]:
    for name, (call, expected) in CALLS.items():
        row: Values = {"what": f"fused.{name}"}
        try:
            with fake_npu():
                got = call()
            shapes = [tuple(t.shape) for t in got]
            if shapes != expected or any(t.dtype != got[0].dtype or t.device.type != "npu" for t in got):
                row["error"] = f"gives {got}, expected {expected}"
        except Exception:
            row["error"] = traceback.format_exc()
        yield row
