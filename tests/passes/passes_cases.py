"""What ranks do in the tests of the passes; each function runs on every rank."""

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from passes_models import MLP, Model, MoE, Parts, Shape, all_reduce, inputs, norm
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
    counts: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = str(node.target).removesuffix(".default").split(".", 1)[-1]
            counts[name] = counts.get(name, 0) + 1
    return counts


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """What a test asks about, small enough to send home."""
    plain, short, report = runs["plain"], runs["short"], runs["report"]
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
        "kinds": kinds(runs["gm"]),
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
            runs = {
                "plain": plain(*arguments),
                "short": short(*arguments),
                "gm": short,
                "report": short.meta["report"],
            }
            results.append(summary(runs))
        eager = network(*inputs(shape, tokens[-1]))
    worst = max(results, key=lambda r: r["error"])
    return worst | {"equal": all(r["equal"] for r in results), "eager": close(eager, runs["plain"])}


def close(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def compared(short: Any, arguments: tuple[Any, ...]) -> tuple[str, float]:
    """Which graph a call runs, and how far it is from the plain one of the same capture."""
    a, name = short(*arguments), short.last_run
    short.force = "plain"
    b = short(*arguments)
    short.force = ""
    return name, 0.0 if torch.equal(a, b) else max(close(a, b), 1e-30)


def compiled_model(shape: Shape, counts: tuple[int, ...], backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Through torch.compile, one dynamic capture; both graphs under the same backend."""
    torch._dynamo.reset()
    short = passes.compile(model(shape), SequenceParallel(**options), backend=backend, dynamic=True)
    return _counted(short, [inputs(shape, count) for count in counts])


class Cells(torch.nn.Module):
    """Every cell of the support matrix as one block between two sums, all of them in one graph."""

    names = tuple(itertools.product((0, 4), (True, False), (False, True)))  # experts, vl, int8

    def __init__(self) -> None:
        super().__init__()
        parts = Parts(dist.get_rank(), dist.get_world_size(), torch.float32)
        self.first = torch.nn.ParameterList(parts.shard(1, 64, 64) for _ in self.names)
        self.blocks, self.norm = torch.nn.ModuleList(), parts.norm(64)
        for experts, vl, int8 in self.names:
            shape = Shape(hidden=64, inner=32, experts=experts, vl=vl, int8=int8, exact=True)
            self.blocks.append((MoE if experts else MLP)(shape, parts))

    def forward(self, x: Tensor, residual: Tensor, deepstack: Tensor) -> tuple[Tensor, ...]:
        outputs, mine = [], x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        for (_, vl, _), first, block in zip(self.names, self.first, self.blocks, strict=True):
            h = all_reduce(mine @ first.t())
            if vl:
                h = h + deepstack
            kept = h + residual
            outputs.append(norm(block(norm(kept, self.norm, 1e-6)) + kept, self.norm, 1e-6))
        return tuple(outputs)


def all_cells(backend: str, counts: tuple[int, ...]) -> dict[str, Any]:
    torch._dynamo.reset()
    short = passes.compile(Cells(), SequenceParallel(min_tokens=4), backend=backend, dynamic=True)
    runs, equal = [], []
    for count in counts:
        generator = torch.Generator().manual_seed(count)
        arguments = [torch.randn(count, 64, generator=generator) for _ in range(3)]
        with torch.no_grad():
            a, name = short(*arguments), short.last_run
            short.force = "plain"
            b = short(*arguments)
        short.force = ""
        runs.append(name)
        equal.append([torch.equal(x, y) for x, y in zip(a, b, strict=True)])
    return {
        "equal": equal,
        "runs": runs,
        "captures": len(short.reports),
        "rewrites": short.report.rewrites,
        "gathers": [(g.dtype, g.row_bytes) for g in short.report.gathers],
    }


def _counted(short: Any, calls: list[tuple[Any, ...]]) -> dict[str, Any]:
    with torch.no_grad():
        comparisons = [compared(short, arguments) for arguments in calls]
    return {
        "equal": all(error == 0 for _, error in comparisons),
        "error": max(error for _, error in comparisons),
        "runs": [name for name, _ in comparisons],
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


def guarded_toy() -> dict[str, Any]:
    """Guards on sizes that a capture ends up with, with and without the passes."""
    from torch._dynamo.backends.common import aot_autograd

    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))

    def guards(backend: Any) -> list[str]:
        torch._dynamo.reset()
        kept: list[str] = []

        def keep(all_guards: Any) -> None:
            kept.extend(sorted(str(g.code_list) for g in all_guards if "SHAPE_ENV" in str(g.guard_types)))

        with torch.no_grad():
            torch._dynamo.optimize(backend, nopython=True, dynamic=True, guard_export_fn=keep)(Toy())(x)
        return kept

    short = passes.compile(Toy(), SequenceParallel(min_tokens=3), backend="eager", dynamic=True)
    captured = guards(short._capture)
    return {"with": captured, "without": guards(aot_autograd(fw_compiler=lambda gm, _: gm.forward))}


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


def toy_inputs(tokens: int) -> tuple[Tensor]:
    return (torch.randn(tokens, 24, generator=torch.Generator().manual_seed(tokens)),)


def compiled_toy(counts: tuple[int, ...], backend: str, minimum: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    short = passes.compile(Toy(), SequenceParallel(min_tokens=minimum), backend=backend, dynamic=True)
    return _counted(short, [toy_inputs(count) for count in counts])


class Gated(torch.nn.Module):
    """bf16 between operators that are one kernel of Inductor in the plain graph; in the other collectives part them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.mine = torch.nn.Parameter(torch.randn(40, 40, dtype=torch.bfloat16), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.linspace(-3, 3, 40, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.sigmoid() * all_reduce(x @ self.mine) + self.bias) @ self.mine


def gated_in_bf16(tokens: int) -> dict[str, Any]:
    """Compiled to machine code both ways, and run operator by operator."""
    x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    runs = {}
    for name, backend, minimum in (("short", "inductor", 1), ("plain", "inductor", 99), ("eager", "eager", 1)):
        torch._dynamo.reset()
        model = passes.compile(Gated(), SequenceParallel(min_tokens=minimum), backend=backend, dynamic=False)
        with torch.no_grad():
            runs[name] = (model(x), model.last_run)
    return {
        "runs": [run for _, run in runs.values()],
        "equal": [torch.equal(runs["short"][0], runs[name][0]) for name in ("plain", "eager")],
    }


def socket_bytes() -> int | None:
    """Bytes that this process has sent over TCP, as the kernel counts them for each of its sockets, each byte once."""
    import os
    import socket
    import struct

    total, has_any = 0, False
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as link:
                info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) >= 216:
            sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
            total, has_any = total + sent - again, True
    return total if has_any else None


def wire_against_report(tokens: int) -> dict[str, tuple[int | None, int]]:
    from passes_rows import ROWS, Weights, arguments

    results = {}
    weights = Weights()
    for name, options in (
        ("MiddleAllReduceRMSNorm", {}),
        ("MiddleAllReduceRMSNorm", {"quantize": "int8"}),
        ("FlashCommMLA", {}),
    ):
        inputs, config = arguments(tokens), SequenceParallel(**options)
        with torch.no_grad():
            gm = captured(lambda *a, name=name: ROWS[name](weights, *a), inputs, False)
            plain, short = passes.order_sums(gm, config), passes.rewrite(gm, config)
        report = short.meta["report"]
        for graph, said in ((plain, report.bytes_before()), (short, report.bytes_after())):
            dist.barrier()
            before = socket_bytes()
            graph(*inputs)
            dist.barrier()  # what the kernel had only taken has left by now
            after = socket_bytes()
            sent = None if before is None or after is None else after - before
            results[f"{name} {options} {'plain' if graph is plain else 'short'}"] = (sent, said)
    return results


def _sum_of(x: Tensor) -> Tensor:
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(x, "sum", dist.group.WORLD)


def another_graph() -> None:
    rank = dist.get_rank()
    gm = captured(lambda x: _sum_of(x).relu() if rank else _sum_of(x).exp(), (torch.ones(4, 8),), False)
    passes.rewrite(gm, SequenceParallel())


def only_rank_0_compiles() -> None:
    import datetime
    from unittest import mock

    if dist.get_rank() == 0:
        gm = captured(lambda x: _sum_of(x).relu(), (torch.ones(4, 8),), False)
        with mock.patch.object(passes.agree, "TIMEOUT", datetime.timedelta(seconds=2)):
            passes.rewrite(gm, SequenceParallel())
    else:  # so that later tests find the two in step
        store = dist.distributed_c10d._get_default_store()
        store.add(f"whorl/{dist.group.WORLD.group_name}/captured graph/turns/{dist.get_rank()}", 1)


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
        self.weight = torch.nn.Parameter(torch.randn(8, 8) + dist.get_rank(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.add_(x @ self.weight)
        return _sum_of(x @ self.weight).relu() @ self.weight


def probed_inputs() -> dict[str, Any]:
    from unittest import mock

    from whorl import collectives
    from whorl.passes import agree, capture

    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    tensors = {
        "sharded": torch.randn(4, 4, generator=generator) + rank,
        "whole": torch.randn(4, 4, generator=generator),
        "empty": torch.zeros(4, 4),
        "norm": torch.ones(4),
    }
    probed = {name: layout.value for name, layout in agree.probe(tensors, collectives.group_name(None)).items()}
    torch._dynamo.reset()
    layouts: dict[str, str] = {}

    def seen(gm: GraphModule, config: SequenceParallel, *, inputs: Any, **more: Any) -> GraphModule:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                layouts[node.meta["whorl_name"]] = inputs[node.name].value
        return passes.rewrite(gm, config, inputs=inputs, **more)

    with torch.no_grad(), mock.patch.object(capture, "rewrite", seen):
        x = torch.randn(4, 8, generator=generator)
        passes.compile(Cached(), SequenceParallel(min_tokens=1), backend="eager")(x)
    return {"probe": probed, "written": layouts["cache"], "ids": layouts["x"]}
