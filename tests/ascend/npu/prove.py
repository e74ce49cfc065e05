"""Runs in a process of its own, where torch_npu is importable without an NPU; writes what it finds as JSON.

usage: python prove.py OUT.json [signatures] [gradients] [calls] [losses] [rotary] [steps] [fake]

signatures  the live schemas
gradients   what backward does for each operator on a FakeTensor npu:0
calls       every torch_npu implementation in whorl.ops, forward and backward, over plain-torch kernels that stand
            behind the npu:: schemas on CPU, against the fp64 reference
rotary      npu_mrope in 16 bits: what a table that is kept so gives it, and what comes out
losses      the losses that call fused operators, with their gradients, the same way
steps       whole training steps by `whorl train`'s trainer, both stages, every converter, the same way
fake        whorl.ascend, the losses, and every call recorded by `calls`, on FakeTensor npu:0 over torch_npu's own
            meta kernels
"""

import functools
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attention_kernels
import collectives
import kernels
import losses
import moe_kernels
import rotary
import sparse_kernels
import step
import torch
import torch_npu
import training_kernels
import vendor
from here import cpu_is_npu, npu_is_at_home_on
from limits import refusing
from more_cases import MORE_CASES
from samples import NPU, SAMPLES, Values
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from whorl import ascend, contracts
from whorl.judge import FLOOR_OF_TOTAL
from whorl.ops import OPS, Op, _torch_npu
from whorl.ops._impl import Impl
from whorl.ops.attention import paged_torch_npu
from whorl.ops.quantised import layout, packed_torch_npu

KERNELS: dict[str, Callable[..., Any]] = (
    kernels.KERNELS
    | moe_kernels.KERNELS
    | attention_kernels.KERNELS
    | sparse_kernels.KERNELS
    | training_kernels.KERNELS
)
# Of a small case: the error of its 64 numbers in one draw is up to 1.5 times that of many. So one draw tells enough if
# it is this far below the 2 that test_torch_npu.py allows; where all tests run, every case has all draws.
WAYS = ("forward", "backward")
DRAWS, CLEAR = 6, 2 / 1.5
IS_ALL = os.environ.get("WHORL_TEST_ALL") == "1"
IN_PLACE: dict[str, Callable[..., Any]] = kernels.IN_PLACE | attention_kernels.IN_PLACE


def main(out: Path, parts: list[str]) -> None:
    torch.manual_seed(0)
    report: Values = {"version": torch_npu.__version__}
    if "signatures" in parts:
        report["signatures"] = live_schemas()
    if "losses" in parts:
        report["losses"] = list(run_losses())
    if "rotary" in parts:
        report |= run_rotary()
    if "steps" in parts:
        report["steps"] = list(run_steps())
    recorded: list[tuple[str, Callable[..., Any], Values, Any, list[list[int]]]] = []
    if "calls" in parts:
        report["calls"] = list(run_calls(recorded))
        report["int4pack"] = run_int4pack()
    if "fake" in parts or "gradients" in parts:
        atb = torch.library.Library("atb", "IMPL", "Meta")
        npu = torch.library.Library("npu", "IMPL", "Meta")
        # torch_npu has no meta kernels for these; that of the last one cannot do without k.
        atb.impl("_npu_rotary_embedding", lambda *args: None)
        npu.impl("npu_moe_gating_top_k_backward", lambda scores, grad, ids, **_: torch.empty_like(scores))
        torch_npu.op_plugin.meta._meta_registrations.get_soc_version = lambda: 220  # which asks the device; Atlas A2
        npu.impl("npu_top_k_top_p", lambda logits, p=None, k=None: torch.empty_like(logits))
    if "gradients" in parts:
        report["gradients"] = {name: gradient_of(name) for name in SAMPLES}
    if "fake" in parts:
        report["fake"] = [*replay(recorded), *ascend_on_fake(), *collectives.on_fake(fake_npu)]
        report["beyond"] = list(vendor.beyond(fake_npu))
        report["documented"] = list(vendor.documented(fake_npu))
        report["fake_losses"] = list(losses.on_fake(fake_npu, host_reads, NPU))
    out.write_text(json.dumps(report, indent=1))


def live_schemas() -> dict[str, str]:
    schemas = {}
    for contract in contracts.CONTRACTS.values():
        packet = getattr(getattr(torch.ops, contract.namespace or "none"), contract.name, None)
        if packet is not None:
            schemas[contract.name] = str(packet.default._schema).split(contract.name, 1)[1]
    return schemas


# The operators of whorl.ops over CPU kernels.


def run_rotary() -> Values:
    calls: list[Any] = []
    library = register_cpu_kernels([], calls)
    with npu_is_at_home_on("cpu"), OPS["rope"].using("torch_npu"):
        report = {"rotary": list(rotary.rows(calls, worst)), "megatron": list(rotary.through_megatron(calls))}
    library._destroy()
    return report


def run_losses() -> Iterator[Values]:
    called: list[str] = []
    library = register_cpu_kernels(called)
    with cpu_is_npu():
        yield from losses.rows(called, worst)
    library._destroy()


def run_steps() -> Iterator[Values]:
    called: list[str] = []
    library = register_cpu_kernels(called)
    yield from step.stages(called)
    library._destroy()


def run_calls(recorded: list[Any]) -> Iterator[Values]:
    """Forward and backward of every operator that has a torch_npu implementation, case by case."""
    called: list[str] = []
    library = register_cpu_kernels(called)
    with npu_is_at_home_on("cpu"), recording(recorded):
        for op in [op for op in OPS.values() if "torch_npu" in op.impls]:
            for case in [*op.cases, *MORE_CASES.get(op.name, [])]:
                for dtype in (torch.float32, torch.bfloat16):
                    called.clear()
                    row = {"op": op.name, "case": str(case), "dtype": str(dtype)[6:]}
                    try:
                        row |= pooled(list(compared(op, case, dtype)))
                    except Exception:
                        row["error"] = traceback.format_exc()
                    yield row | {"called": sorted(set(called))}
    library._destroy()


def compared(op: Op, case: Values, dtype: torch.dtype) -> Iterator[Values]:
    """A row for each draw: one draw if it is clear, else all."""
    first = compare(op, drawn(op, case, dtype, 0))
    yield first
    is_clear = "refused" in first or all(first[way]["ratio"] <= CLEAR for way in WAYS if way in first)
    for seed in range(1, DRAWS) if IS_ALL or not is_clear else ():
        yield compare(op, drawn(op, case, dtype, seed))


def run_int4pack() -> dict[str, list[Any]]:
    """A weight of 4 bits as whorl lays it out, and as torch_npu's own operator packs it."""
    library = register_cpu_kernels([])
    numbers = torch.randint(0, 16, (3, 40, 24), dtype=torch.int32)
    theirs = torch.ops.npu.npu_convert_weight_to_int4pack((numbers - 8).mT.contiguous())
    library._destroy()
    return {
        "ours": packed_torch_npu._weight(layout.paired_int4(numbers), "int4_paired").tolist(),
        "theirs": theirs.tolist(),
    }


def drawn(op: Op, case: Values, dtype: torch.dtype, seed: int) -> Values:
    torch.default_generator.manual_seed(seed)  # a case's numbers are its own, whatever was proven before it
    values = made(op, **case, dtype=dtype)
    if "eps" in values:
        values["eps"] = 1e-3  # torch_npu's default would hide that it was not passed
    return strided(values) if dtype == torch.bfloat16 else values


def pooled(rows: list[Values]) -> Values:
    """Of a case's draws: the root of the mean square of their ratios."""
    if "refused" in rows[0]:
        return rows[0]
    worst = {}
    for way in [way for way in WAYS if way in rows[0]]:
        draws = [row[way] for row in rows]
        worst[way] = max(draws, key=lambda d: d["ratio"]) | {"ratio": rms(torch.tensor([d["ratio"] for d in draws]))}
    return worst


def made(op: Op, idle_rows: int = 0, shared: bool = False, **case: Any) -> Values:
    """An operator's arguments; `idle_rows` rows of q belong to no sequence; `shared`: one sequence's blocks for all."""
    values = op.make(**case, device="cpu")
    if shared:
        count = values["block_tables"].shape[1]
        values["block_tables"][:] = torch.arange(count)
        values |= {n: values[n][:count].contiguous() for n in ("k_cache", "v_cache")}
    if idle_rows:
        for name in [n for n in ("q", "weights") if n in values]:
            values[name] = torch.cat((values[name], torch.randn(idle_rows, *values[name].shape[1:]).to(values[name])))
        if values.get("indices") is not None:
            values["indices"] = torch.nn.functional.pad(values["indices"], (0, 0, 0, idle_rows), value=-1)
            values["indices"][-idle_rows:, 0] = 0  # a key, and yet no sequence
    return values


def strided(values: Values) -> Values:
    """The same numbers in tensors that are not contiguous; caches, which are allocated whole, stay as they are."""

    def widened(x: Tensor) -> Tensor:
        return torch.cat((x, x[..., :1]), -1)[..., :-1]

    return {
        n: widened(v) if is_float(v) and v.dim() > 1 and not n.endswith(("cache", "_scale")) else v
        for n, v in values.items()
    }


def register_cpu_kernels(called: list[str], calls: list[Any] | None = None) -> torch.library.Library:
    """Our formulas behind the npu:: schemas; each refuses what the vendor documents that the device refuses.

    `called` gets the name of every call, `calls` its arguments too.
    """
    library = torch.library.Library("npu", "IMPL", "CPU")

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            if calls is not None:
                calls.append((name, args, kwargs))
            return kernel(*args, **kwargs)

        return run

    for name, kernel in (KERNELS | IN_PLACE).items():
        if contracts.CONTRACTS[name].namespace == "npu":
            library.impl(name, counted(name, refusing(name, kernel)))
    return library


def recorder(name: str, function: Callable[..., Any], recorded: list[Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        more = next(
            (bound.pop(n) for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD and n in bound), {}
        )
        values = {n: describe(v) for n, v in (bound | more).items()}
        with host_reads(reads := [], read=_torch_npu.on_host):
            out = function(*args, **kwargs)
        recorded.append((name, function, values, describe(out), reads))
        return out

    return run


@contextmanager
def host_reads(reads: list[list[int]], read: Callable[[Tensor], list[int]]) -> Iterator[None]:
    """What implementations read back from the device comes from `read` and is kept in `reads`."""

    def keep(x: Tensor) -> list[int]:
        reads.append(read(x))
        return reads[-1]

    original, _torch_npu.on_host = _torch_npu.on_host, keep
    try:
        yield
    finally:
        _torch_npu.on_host = original


@contextmanager
def recording(recorded: list[Any]) -> Iterator[None]:
    """Keep the arguments and results of every torch_npu implementation, those of backward operators too."""
    originals = {op.name: op.impls["torch_npu"] for op in OPS.values() if "torch_npu" in op.impls}
    for name, impl in originals.items():
        OPS[name].impls["torch_npu"] = Impl("torch_npu", recorder(name, impl.function, recorded), impl.accepts)
    yield
    for name, impl in originals.items():
        OPS[name].impls["torch_npu"] = impl


def compare(op: Op, values: Values) -> Values:
    try:
        op.choose(**values, backend="torch_npu")
    except RuntimeError as refused:
        return {"refused": str(refused)}
    if op.mutates:
        return compare_in_place(op, values)
    ours = functools.partial(op, backend="torch_npu")
    row = {"forward": worst(ours(**values), op.reference(**values), op.reference(**exact(values)))}
    if names := differentiable(op, values):
        reference, gold = gradients(op.reference, values, names), gradients(op.reference, exact(values), names)
        row["backward"] = worst(gradients(ours, values, names), reference, gold)
    return row


def compare_in_place(op: Op, values: Values) -> Values:
    def written(run: Callable[..., Any], values: Values) -> tuple[Any, ...]:
        values = values | {n: values[n].clone() for n in op.mutates if values[n] is not None}
        run(**values)
        return tuple(values[n] for n in op.mutates)

    ours = functools.partial(op, backend="torch_npu")
    answers = (
        written(run, inputs) for run, inputs in ((ours, values), (op.reference, values), (op.reference, exact(values)))
    )
    return {"forward": worst(*answers, has_rounded_codes=op.name == "qk_norm_rope_write")}


def exact(values: Values) -> Values:
    return {n: v.double() if is_float(v) else v for n, v in values.items()}


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def differentiable(op: Op, values: Values) -> list[str]:
    """Arguments that may require a gradient; a table, for one, may not. A backward operator has none itself."""
    if op.forward_only:
        return []
    names = []
    for name in [n for n, v in values.items() if is_float(v) and not op.name.endswith("_backward")]:
        try:
            op(**values | {name: values[name].detach().requires_grad_()})
            names.append(name)
        except ValueError:
            continue
    return names


def gradients(run: Callable[..., Any], values: Values, names: list[str]) -> tuple[Tensor, ...]:
    leaves = {n: values[n].detach().clone().requires_grad_() for n in names}
    outputs = [o for o in listed(run(**values | leaves)) if o is not None and o.requires_grad]
    generator = torch.Generator().manual_seed(1)
    # The same upstream gradient for every dtype, exact in all of them.
    upstream = [torch.randint(-8, 9, o.shape, generator=generator).to(o.dtype) / 8 for o in outputs]
    return torch.autograd.grad(outputs, list(leaves.values()), upstream)


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def worst(got: Any, reference: Any, gold: Any, *, has_rounded_codes: bool = False) -> Values:
    """The largest ratio, over the outputs, of the error to what the reference's own rounding allows.

    has_rounded_codes: int8 codes are of numbers that were computed and rounded before, and may be one step apart.
    """
    ratios = []
    for g, r, exactly in zip(listed(got), listed(reference), listed(gold), strict=True):
        if (g is None) != (r is None):
            return {"ratio": math.inf, "why": "an output is None on one side only"}
        if g is None:
            continue
        if g.shape != r.shape or g.dtype != r.dtype:
            return {"ratio": math.inf, "why": f"{g.shape} {g.dtype}, the reference gives {r.shape} {r.dtype}"}
        if not g.is_floating_point():
            apart = (g.int() - r.int()).abs()
            is_near = has_rounded_codes and g.dtype == torch.int8 and apart.max() <= 1
            ratios.append(0.0 if torch.equal(g, r) or is_near else math.inf)
            continue
        is_infinite = exactly.isinf()
        if not torch.equal(g[is_infinite].double(), exactly[is_infinite]):
            return {"ratio": math.inf, "why": "an infinity is not where the reference has it"}
        g, r, exactly = (x[~is_infinite] for x in (g, r, exactly))
        # The rms error of a handful of numbers is a matter of luck: there half an ulp is allowed in any case, and of
        # a total four, for the roundings of its terms.
        ulps = FLOOR_OF_TOTAL if g.numel() == 1 else 1 / 64 if g.numel() >= 64 else 1 / 2
        least = rms(exactly) * torch.finfo(g.dtype).eps * ulps
        error, allowed = rms(g.double() - exactly), rms(r.double() - exactly) + least
        ratios.append(0.0 if error == 0 else error / allowed if allowed else math.inf)
    return {"ratio": max(ratios, default=0.0)}


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


# FakeTensor npu:0.


@contextmanager
def fake_npu() -> Iterator[None]:
    """FakeTensors may be on npu:0; torch.tensor(list, device=npu) must not touch the device that is not there."""
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


def describe(value: Any) -> Any:
    """Shape, strides and dtype of a tensor; lists and tuples element by element; anything else itself."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), tuple(value.stride()), value.dtype)
    return [describe(v) for v in value] if isinstance(value, tuple | list) else value


def revive(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("tensor",):
        return torch.empty_strided(value[1], value[2], dtype=value[3], device=NPU)
    return [revive(v) for v in value] if isinstance(value, list) else value


def replay(recorded: list[Any]) -> Iterator[Values]:
    seen = set()
    for name, function, values, expected, reads in recorded:
        key = (name, str(values), str(reads))
        if key in seen:
            continue
        seen.add(key)
        row = {"what": name, "case": str(values)}
        try:
            paged_torch_npu.compressed_mask.cache_clear()
            packed_torch_npu.no_offset.cache_clear()
            left = iter(reads)
            with fake_npu(), host_reads([], read=lambda _, left=left: next(left)):  # a FakeTensor has no numbers
                arguments = {n: revive(v) for n, v in values.items()}
                choice = OPS[name].choose(**arguments)
                out = function(**arguments)
            got = describe(out)
            if choice.backend != "torch_npu":
                row["error"] = f"an NPU tensor gets backend {choice.backend}: {choice.reasons}"
            elif shapes(got) != shapes(expected):
                row["error"] = f"gives {shapes(got)}, expected {shapes(expected)}"
            elif any(t.device != torch.device(NPU) for t in listed(out) if t is not None):
                row["error"] = "an output left the device"
        except Exception:
            row["error"] = traceback.format_exc()
        yield row


def shapes(described: Any) -> Any:
    if isinstance(described, list):
        return [shapes(d) for d in described]
    return (described[1], described[3]) if isinstance(described, tuple) else described


def ready(keywords: Values) -> Values:
    """Tensors among them are made inside the mode."""
    return {n: v() if callable(v) else v for n, v in keywords.items()}


def leaf(args: list[Any], i: int) -> Tensor:
    tensor: Tensor = listed(args[i])[0]
    return tensor.requires_grad_()


def gradient_of(name: str) -> str:
    """'yes', 'raises' or 'silently lost': what torch_npu's own operator does when backward reaches it."""
    make, keywords, leaf_indices = SAMPLES[name]
    with fake_npu():
        args = make()
        leaves = [leaf(args, i) for i in leaf_indices]
        for i in leaf_indices:  # not a leaf, so that an operator in place may write it
            args[i] = [args[i][0] * 1] if isinstance(args[i], list) else args[i] * 1
        before = [listed(args[i])[0].grad_fn for i in leaf_indices]
        out = getattr(torch_npu, name)(*args, **ready(keywords))
        outputs = [args[i] for i in leaf_indices] if out is None else listed(out)
        if out is None and [o.grad_fn for o in outputs] == before:
            return "silently lost"  # written behind autograd's back
        try:
            torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])
        except RuntimeError as error:
            return "raises" if "not implemented" in str(error) else str(error)
        return "yes" if all(leaf.grad is not None for leaf in leaves) else "silently lost"


def ascend_on_fake() -> Iterator[Values]:
    """On NPU tensors whorl.ascend calls torch_npu: same outputs, and a gradient where torch_npu has one."""
    for name, (make, keywords, leaf_indices) in SAMPLES.items():
        row = {"what": f"ascend.{name}"}
        try:
            with fake_npu():
                ours = describe(getattr(ascend, name)(*make(), **ready(keywords)))
                theirs = describe(getattr(torch_npu, name)(*make(), **ready(keywords)))
                if ours != theirs:
                    row["error"] = f"gives {ours}, torch_npu gives {theirs}"
                elif contracts.CONTRACTS[name].gradient == "yes":
                    args = make()
                    leaves = [leaf(args, i) for i in leaf_indices]
                    outputs = listed(getattr(ascend, name)(*args, **ready(keywords)))
                    next(o for o in outputs if o.requires_grad).sum().backward()
                    if any(leaf.grad is None for leaf in leaves):
                        row["error"] = "a gradient is missing"
        except Exception:
            row["error"] = traceback.format_exc()
        yield row


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
