"""What ranks do in the tests of the passes; each function runs on every rank."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from passes_models import Model, Shape, inputs
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from whorl import passes
from whorl.passes import SequenceParallel


def captured(function: Any, arguments: tuple[Any, ...], dynamic: bool) -> GraphModule:
    mode = "symbolic" if dynamic else "fake"
    return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*arguments)


def both(
    function: Any, arguments: tuple[Any, ...], config: SequenceParallel, dynamic: bool = False, pipeline: Any = None
) -> dict[str, Any]:
    """The graph as it is and rewritten, with what each gives."""
    with torch.no_grad():
        gm = captured(function, arguments, dynamic)
        plain = passes.order_sums(gm, config)
        short = passes.rewrite(gm, config, pipeline=pipeline or passes.PIPELINE)
        return {"plain": plain(*arguments), "short": short(*arguments), "gm": short, "report": short.meta["report"]}


def kinds(gm: GraphModule) -> dict[str, int]:
    """How many of each operator, the shape ones left out."""
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = str(node.target).removesuffix(".default").split(".", 1)[-1]
            found[name] = found.get(name, 0) + 1
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """What a test asks about, small enough to send home."""
    plain, short, report = found["plain"], found["short"], found["report"]
    pairs = list(zip(plain, short, strict=True)) if isinstance(plain, tuple) else [(plain, short)]
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "error": max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0),
        "scale": max((float(a.abs().max()) for a, _ in pairs if a.numel()), default=0.0),
        "rewrites": report.rewrites,
        "collectives": len(report.collectives),
        "gathers": [(g.dtype, g.row_bytes) for g in report.gathers],
        "sliced": report.sliced,
        "gemms": report.gemms,
        "exactness": report.exactness,
        "ratio": report.bytes_after(1024) / max(1, report.bytes_before(1024)),
        "kinds": kinds(found["gm"]),
        "hash": report.graph_hash,
    }


def model(shape: Shape) -> Model:
    return Model(shape, dist.get_rank(), dist.get_world_size())


def run_model(shape: Shape, tokens: tuple[int, ...], dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """The model's graph once; equality at each number of tokens."""
    config = SequenceParallel(**options)
    network = model(shape)
    with torch.no_grad():
        gm = captured(network, inputs(shape, tokens[0]), dynamic)
        plain, short = passes.order_sums(gm, config), passes.rewrite(gm, config)
        results = []
        for count in tokens:
            arguments = inputs(shape, count)
            found = {
                "plain": plain(*arguments),
                "short": short(*arguments),
                "gm": short,
                "report": short.meta["report"],
            }
            results.append(summary(found))
        eager = network(*inputs(shape, tokens[-1]))
    worst = max(results, key=lambda r: r["error"])
    return worst | {"equal": all(r["equal"] for r in results), "eager": close(eager, found["plain"])}


def close(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def compiled_model(shape: Shape, counts: tuple[int, ...], backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Through torch.compile, one dynamic capture, with and without sequence parallelism under the same backend."""
    torch._dynamo.reset()
    config = SequenceParallel(**options)
    network = model(shape)
    short = passes.compile(network, config, backend=backend, dynamic=True)
    plain = passes.compile(network, dataclasses.replace(config, min_tokens=1 << 40), backend=backend, dynamic=True)
    found, runs, error = True, [], 0.0
    with torch.no_grad():
        for count in counts:
            arguments = inputs(shape, count)
            a, b = short(*arguments), plain(*arguments)
            found = found and torch.equal(a, b)
            error = max(error, close(a, b))
            runs.append(short.last_run)
    return {
        "equal": found,
        "error": error,
        "runs": runs,
        "captures": len(short.reports),
        "rewrites": short.report.rewrites,
        "gathers": [(g.dtype, g.row_bytes) for g in short.report.gathers],
        "text": str(short.report),
    }


def run_program(steps: list[str], tokens: int) -> dict[str, Any]:
    from passes_programs import STEPS
    from passes_rows import Weights, arguments

    weights = Weights()

    def function(x: Tensor, residual: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        for step in ("layer", *steps):
            x, residual = STEPS[step](weights, x, residual)
        return x, residual

    return summary(both(function, arguments(tokens), SequenceParallel()))


def guarded_model(counts: tuple[int, ...], minimum: int) -> dict[str, Any]:
    """Guards on sizes that a capture ends up with, with and without the passes."""
    shape = Shape(layers=1)
    found = compiled_model(shape, counts, "eager", {"min_tokens": minimum})

    def guards(call: Any) -> list[str]:
        torch._dynamo.reset()
        kept: list[str] = []

        def keep(given: Any) -> None:
            kept.extend(sorted(str(g.code_list) for g in given if "SHAPE_ENV" in str(g.guard_types or g.name)))

        with torch.no_grad(), torch._dynamo.config.patch(caching_precompile=False):
            compiled = torch._dynamo.optimize(call, nopython=True, dynamic=True, guard_export_fn=keep)(model(shape))
            compiled(*inputs(shape, counts[0]))
        return kept

    from torch._dynamo.backends.common import aot_autograd

    short = passes.compile(model(shape), SequenceParallel(min_tokens=minimum), backend="eager", dynamic=True)
    without = guards(aot_autograd(fw_compiler=lambda gm, _: gm.forward))
    return found | {"guards": guards(short._capture), "guards_without": without}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.RMSNorm(32), torch.nn.Linear(32, 64, bias=False)
        self.down = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def compiled_dtensor(tokens: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch._dynamo.reset()
    torch.manual_seed(3)
    network = torch.nn.Sequential(Block(), Block(), torch.nn.RMSNorm(32)).requires_grad_(False)
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))
    expected = network(x)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(network)[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    config = SequenceParallel(group=mesh.get_group(), min_tokens=1)
    short = passes.compile(network, config, backend="eager")
    plain = passes.compile(network, dataclasses.replace(config, min_tokens=1 << 40), backend="eager")
    with torch.no_grad():
        a, b = short(x), plain(x)
    return {
        "equal": torch.equal(a, b),
        "rewrites": short.report.rewrites,
        "close_to_one_process": torch.allclose(a, expected, atol=1e-5),
        "text": str(short.report),
    }


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.mine = torch.nn.Parameter(torch.randn(24, 24), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as functional

        y = functional.all_reduce(x @ self.mine, "sum", dist.group.WORLD)
        y = torch.nn.functional.softplus(y - y.amax(-1, keepdim=True)) * x.tanh()
        y = y / (y.square().sum(-1, keepdim=True) + 0.0371).sqrt()
        return (y.unflatten(-1, (3, 8)).cumsum(-1).flatten(1) - 0.5) @ self.mine


def compiled_toy(tokens: int) -> dict[str, Any]:
    torch._dynamo.reset()
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(2))
    short = passes.compile(Toy(), SequenceParallel(min_tokens=2), backend="eager")
    plain = passes.compile(Toy(), SequenceParallel(min_tokens=1 << 40), backend="eager")
    with torch.no_grad():
        return {"equal": torch.equal(short(x), plain(x)), "rewrites": short.report.rewrites, "text": str(short.report)}


def socket_bytes() -> int | None:
    """Bytes that this process has sent over TCP, as the kernel counts them for each of its sockets."""
    import os
    import socket
    import struct

    total, found = 0, False
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as link:
                info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) >= 208:
            total, found = total + struct.unpack_from("Q", info, 200)[0], True  # tcpi_bytes_sent
    return total if found else None


def wire_against_report(tokens: int) -> dict[str, tuple[int | None, int]]:
    from passes_rows import ROWS, Weights, arguments

    found = {}
    weights = Weights()
    for name, options in (
        ("MiddleAllReduceRMSNorm", {}),
        ("MiddleAllReduceRMSNorm", {"quantize": "int8"}),
        ("FlashCommMLA", {}),
    ):
        given, config = arguments(tokens), SequenceParallel(**options)
        with torch.no_grad():
            gm = captured(lambda *a, name=name: ROWS[name](weights, *a), given, False)
            plain, short = passes.order_sums(gm, config), passes.rewrite(gm, config)
        report = short.meta["report"]
        for graph, said in ((plain, report.bytes_before()), (short, report.bytes_after())):
            dist.barrier()
            before = socket_bytes()
            graph(*given)
            after = socket_bytes()
            sent = None if before is None or after is None else after - before
            found[f"{name} {options} {'plain' if graph is plain else 'short'}"] = (sent, said)
    return found
