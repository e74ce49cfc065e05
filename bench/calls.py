"""`python -m bench.calls`: host overhead of eager calls, which is how long a call blocks the caller.

Tensors are so small that the device keeps up, and calls follow each other without synchronizing. Each operator is timed
next to its chosen implementation called directly ("mechanism" is the difference: checks and choice of the backend),
torch's functions, bare Triton launches of the same kernels, and Liger. Figures are medians over repeats, in which all
variants take turns.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from whorl import device as devices
from whorl.bench.peer import Values, liger_function, tensors_of
from whorl.bench.peers import hf_glu, hf_rope, hf_tables, to_hf
from whorl.bench.provenance import Document, provenance, render_provenance
from whorl.bench.report import Benchmark, finish
from whorl.ops import OPS, Op
from whorl.options import Device, Dtype, Json, exit_on_bad_usage

app = typer.Typer(add_completion=False)
Run = Callable[[], Any]
CALLS = 50  # timed together, far fewer than the thousand launches that a GPU can queue
TOKENS, CHANNELS, HEADS, KV_HEADS, DIM, EXPERTS = 4, 256, 4, 2, 64, 16
EPS = 1e-6
MODES = {
    "inference": "without gradients",
    "gradient": "the forward alone, recorded by autograd",
    "both": "forward and backward",
}
COLUMNS = ("whorl", "direct", "torch", "triton", "liger")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operator and its peers.

    values: function from dtype and device to its arguments by name. leaves: those that get gradients; () for an
    operator without one. torch: the same in plain torch. liger: module and class of Liger; to_liger: its arguments.
    """

    op: Op
    values: Callable[[torch.dtype, str], Values]
    leaves: tuple[str, ...]
    torch: Callable[[Values], Any]
    liger: tuple[str, str] | None = None
    to_liger: Callable[[Values], tuple[Any, ...]] = lambda values: tuple(values.values())


def _norm(*names: str) -> Callable[[torch.dtype, str], Values]:
    def values(dtype: torch.dtype, device: str) -> Values:
        rows = {name: torch.randn(TOKENS, CHANNELS, dtype=dtype, device=device) for name in names}
        return rows | {"weight": torch.ones(CHANNELS, dtype=dtype, device=device), "eps": EPS}

    return values


def _heads(dtype: torch.dtype, device: str) -> Values:
    q, k = (torch.randn(TOKENS, n, DIM, dtype=dtype, device=device) for n in (HEADS, KV_HEADS))
    angles = torch.randn(TOKENS, DIM // 2, device=device)
    return {"q": q, "k": k, "cos_sin": torch.cat((angles.cos(), angles.sin()), -1)}


def _hf_heads(values: Values) -> tuple[Tensor, ...]:
    return to_hf(values["q"]), to_hf(values["k"]), *hf_tables(values | {"positions": None}, values["q"].dtype)


def _gate_up(dtype: torch.dtype, device: str) -> Values:
    return {"x": torch.randn(TOKENS, 2 * CHANNELS, dtype=dtype, device=device)}


def _product(dtype: torch.dtype, device: str) -> Values:
    x, weight = (torch.randn(n, CHANNELS, dtype=dtype, device=device) for n in (TOKENS, CHANNELS))
    return {"x": x, "weight": weight}


def _logits(name: str, **more: Any) -> Callable[[torch.dtype, str], Values]:
    return lambda dtype, device: {name: torch.randn(TOKENS, EXPERTS, dtype=dtype, device=device), **more}


def _torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _torch_add_norm(values: Values) -> tuple[Tensor, Tensor]:
    total = values["x"] + values["residual"]
    return _torch_norm(total, values["weight"]), total


def _torch_route(values: Values) -> Any:
    weights, ids = torch.softmax(values["logits"].float(), -1).topk(values["k"])
    return weights / weights.sum(-1, keepdim=True), ids


def _rotation(name: str, *leaves: str) -> Case:
    return Case(
        op=OPS[name],
        values=_heads,
        leaves=leaves,
        torch=lambda values: hf_rope(*_hf_heads(values)),
        liger=("rope", "LigerRopeFunction"),
        to_liger=_hf_heads,
    )


def _cases() -> list[Case]:
    return [
        Case(
            op=OPS["rms_norm"],
            values=_norm("x"),
            leaves=("x", "weight"),
            torch=lambda values: _torch_norm(values["x"], values["weight"]),
            liger=("rms_norm", "LigerRMSNormFunction"),
        ),
        Case(
            op=OPS["add_rms_norm"],
            values=_norm("x", "residual"),
            leaves=("x", "residual", "weight"),
            torch=_torch_add_norm,
            liger=("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
        ),
        _rotation("rope", "q", "k"),
        _rotation("rope_"),
        Case(
            op=OPS["glu"],
            values=_gate_up,
            leaves=("x",),
            torch=lambda values: hf_glu(values["x"]),
            liger=("swiglu", "LigerFusedGateUpSiLUMulFunction"),
        ),
        Case(op=OPS["linear"], values=_product, leaves=("x", "weight"), torch=lambda values: F.linear(**values)),
        Case(op=OPS["route"], values=_logits("logits", k=2), leaves=("logits",), torch=_torch_route),
        Case(
            op=OPS["log_softmax"],
            values=_logits("logits"),
            leaves=("logits",),
            torch=lambda values: torch.log_softmax(values["logits"], -1),
        ),
    ]


# ---- measuring


def run(device: str, dtype: str, repeats: int) -> Document:
    """Time every case in every mode; returns the document to print."""
    rows = [
        _row(case, mode, getattr(torch, dtype), device, repeats)
        for case in _cases()
        for mode in (MODES if case.leaves else ("inference",))
    ]
    return provenance(device) | {"dtype": dtype, "calls": CALLS, "repeats": repeats, "rows": rows}


def is_good(document: Document) -> bool:
    """Return whether every operator agrees with its reference."""
    return all(row["is_right"] for row in document["rows"])


def _row(case: Case, mode: str, dtype: torch.dtype, device: str, repeats: int) -> Document:
    values = case.values(dtype, device)
    row: Document = {"op": case.op.name, "mode": mode, "backend": case.op.choose(**values).backend}
    row["is_right"] = _agrees(case, values)
    variants = _variants(case, mode, values)
    with nullcontext() if mode != "inference" else torch.inference_mode():
        medians = _medians(variants, device, repeats) if row["is_right"] else {}
    row |= {f"{name}_us": medians.get(name) for name in COLUMNS}
    direct = medians.get("direct")
    return row | {"mechanism_us": None if direct is None else medians["whorl"] - direct}


def _agrees(case: Case, values: Values) -> bool:
    """Return whether the operator agrees with its reference within a rounding or two; else no speed is reported."""
    actual, expected = (_answers(case.op, call, values) for call in (case.op, case.op.reference))
    eps = max(torch.finfo(t.dtype).eps for t in actual if t.is_floating_point())
    return all(
        torch.allclose(a.float(), b.float(), rtol=4 * eps, atol=4 * eps) for a, b in zip(actual, expected, strict=True)
    )


def _answers(op: Op, call: Callable[..., Any], values: Values) -> list[Tensor]:
    arguments: Values = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    out = call(**arguments)
    return tensors_of([arguments[n] for n in op.mutates] if op.mutates else out)


def _variants(case: Case, mode: str, values: Values) -> dict[str, Run]:
    op, has_gradient = case.op, mode != "inference"
    values_copy = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    leaves = [values_copy[n].requires_grad_() for n in case.leaves if has_gradient]
    arguments = tuple(values_copy.values())
    variants: dict[str, Run] = {"whorl": lambda: op(*arguments), "torch": lambda: case.torch(values_copy)}
    if case.liger is not None and (liger := liger_function(values_copy, *case.liger)) is not None:
        liger_arguments = case.to_liger(values_copy)
        variants["liger"] = lambda: liger.apply(*liger_arguments)
    if mode == "both":
        variants = {name: _with_backward(variant, leaves) for name, variant in variants.items()}
    else:
        bound = op._bind((), values)
        function = op.choose(**values).function
        variants["direct"] = lambda: function(**bound)
    if (bare := _bare_launches(variants["whorl"], values_copy)) is not None:
        variants["triton"] = bare
    return variants


def _with_backward(forward: Run, leaves: Sequence[Tensor]) -> Run:
    """Return a call of forward and backward; the gradients of the outputs are ones."""
    grads = [torch.ones_like(t) for t in tensors_of(forward()) if t.requires_grad]

    def both() -> None:
        outs = [t for t in tensors_of(forward()) if t.requires_grad]
        torch.autograd.grad(outs, leaves, grads)

    return both


def _bare_launches(call: Run, values: Values) -> Run | None:
    """Return a call that launches the same kernels through Triton alone; None where there are none."""
    device = next(v for v in values.values() if isinstance(v, Tensor)).device.type
    if devices.unavailable("triton", device) is not None:
        return None
    launches = recorded_launches(call)
    if not launches:
        return None

    def launch() -> None:
        for one in launches:
            one()

    return launch


def recorded_launches(call: Run) -> list[Run]:
    """Run a call and return each of its Triton launches as a function that repeats it."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    launches: list[Run] = []
    original, watch = JITFunction.run, lambda *_: None

    def record(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(functools.partial(original, kernel, *args, **kwargs))
        return original(kernel, *args, **kwargs)

    knobs.runtime.launch_enter_hook.add(watch)  # a hook makes whorl's cached launches go through Triton
    JITFunction.run = record
    try:
        call()
    finally:
        JITFunction.run = original
        knobs.runtime.launch_enter_hook.remove(watch)
    return launches


def _medians(variants: dict[str, Run], device: str, repeats: int) -> dict[str, float]:
    """Return the median microseconds per call of each variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        _seconds(variant, device)  # warm up: compile kernels and fill caches
    for _ in range(repeats):
        for name, variant in variants.items():
            times[name].append(_seconds(variant, device) / CALLS * 1e6)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _seconds(variant: Run, device: str) -> float:
    # On the CPU count this thread's CPU time, so that other processes do not matter. With a device count wall time,
    # since the caller may also wait for the device.
    clock = time.thread_time if device == devices.HOST else time.perf_counter
    devices.synchronize(device)
    start = clock()
    for _ in range(CALLS):
        variant()
    return clock() - start


# ---- report


def render(document: Document) -> str:
    """Return the document as text."""
    heading = f"{'operator':14} {'calls':10} {'backend':10}" + "".join(
        f"{name:>10}" for name in (*COLUMNS, "mechanism")
    )
    lines = [*render_provenance(document), f"dtype     {document['dtype']}", "", "host microseconds per call", heading]
    for row in document["rows"]:
        figures = (row[f"{name}_us"] for name in (*COLUMNS, "mechanism"))
        shown = "".join(f"{'-' if us is None else format(us, '.1f'):>10}" for us in figures)
        note = "" if row["is_right"] else "  wrong answer"
        lines.append(f"{row['op']:14} {row['mode']:10} {row['backend']:10}{shown}{note}")
    return "\n".join([*lines, "", *(f"{name:10} {meaning}" for name, meaning in MODES.items())])


@app.command()
def main(
    device: Annotated[Device | None, typer.Option(help="Default: the best device of this machine.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="dtype of the inputs.")] = Dtype.bfloat16,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs of 50 calls; the median is reported.")] = 41,
    as_json: Json = False,
) -> None:
    """Time the host overhead of eager calls of small operators, next to torch, bare Triton launches and Liger."""
    with exit_on_bad_usage():
        where = devices.require(device or devices.default_device())
    finish(Benchmark(run=lambda: run(where, dtype.value, repeats), render=render, is_good=is_good), as_json)


if __name__ == "__main__":
    app()
