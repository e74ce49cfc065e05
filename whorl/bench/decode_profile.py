"""`whorl bench decode --profile`: the time of a decode step, by part of a layer."""

import contextlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from whorl import device as devices
from whorl.bench import decode_report, step_trace
from whorl.bench.decode_engine import (
    DecodeSettings,
    Distinct,
    count_experts,
    end,
    engine,
    expert_figures,
    free,
    header,
    load,
    start,
)
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark
from whorl.bench.step_trace import EXPERTS, HEAD, MARK, STEP, Event, Kernel
from whorl.engine.llm import LLM
from whorl.engine.memory import cache_specs
from whorl.engine.roofline import copy_bandwidth, layer_bytes
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import weighted

_STEPS = 8  # number of traced steps
_WARM = 4  # steps before the trace
# Part of a layer by the last component of a module's name. Work outside of a module's submodules counts as its own.
_MODULES = {
    "embed_tokens": "embedding",
    **{f"{place}_layernorm": "norms" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")},
    "norm": "norms",
    "self_attn": "attention",
    "qkv_proj": "qkv product",
    "o_proj": "output product",
    "gate": "router",
    "experts": EXPERTS,
    "gate_up_proj": "gate/up product",
    "down_proj": "down product",
    "lm_head": HEAD,
}
_ONCE = ("embedding", HEAD, step_trace.SAMPLING, step_trace.INPUTS)  # once in a step, not in every layer
_ORDER = (
    *("inputs", "embedding", "norms", "qkv product", "attention", "output product", "router", EXPERTS, "experts sort"),
    *("experts gate/up", "experts down", "experts combine", "gate/up product", "feed-forward", "down product"),
    *(HEAD, "sampling", "other"),
)


def part_of(name: str, module: Any) -> str | None:
    """Return the part that a module belongs to, by its name; None: it counts to the module around it."""
    last = name.rpartition(".")[2]
    if last == "mlp":
        return "router" if hasattr(module, "experts") else "feed-forward"
    return _MODULES.get(last)


@contextlib.contextmanager
def marked(model: Any) -> Iterator[None]:
    """Mark the parts of the model in profiler traces, inside this context."""
    handles = []
    for name, module in model.named_modules():
        if (part := part_of(name, module)) is not None:
            handles += _mark(module, part)
    logits = model.logits

    def marked_logits(hidden: torch.Tensor) -> torch.Tensor:
        with record_function(MARK + HEAD):
            return logits(hidden)  # type: ignore[no-any-return]

    model.logits = marked_logits
    try:
        yield
    finally:
        del model.logits  # uncovers the method of the class
        for handle in handles:
            handle.remove()


def _mark(module: Any, part: str) -> list[Any]:
    open_marks: list[Any] = []

    def before(module: Any, inputs: Any) -> None:
        mark = record_function(MARK + part)
        mark.__enter__()
        open_marks.append(mark)

    def after(module: Any, inputs: Any, result: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    handles: list[Any] = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return handles if getattr(module, "after_norm", None) is None else [*handles, _MarkedAfter(module, part)]


class _MarkedAfter:
    """Marks a module that is called through its `after_norm` method, which fuses the norm before it."""

    def __init__(self, module: Any, part: str) -> None:
        self._module, original = module, module.after_norm

        def after(*args: Any, **options: Any) -> Any:
            with record_function(MARK + part):
                return original(*args, **options)

        module.after_norm = after

    def remove(self) -> None:
        del self._module.after_norm


def need_profiler(device: str) -> None:
    """Raise ValueError when torch's profiler cannot trace the kernels of `device`."""
    if devices.accelerator(device) is not None and not hasattr(ProfilerActivity, device.upper()):
        raise ValueError(f"--profile: torch's profiler cannot trace {device} kernels; leave it out or use --device cpu")


def benchmark(settings: DecodeSettings) -> Benchmark:
    """Return the benchmark; raises ValueError where the profiler knows no kernels of the device."""
    need_profiler(settings.device)
    return Benchmark(run=lambda: run(settings), render=decode_report.render_profile)


def run(settings: DecodeSettings) -> Document:
    """Profile every row.

    Returns {"header": ..., "profiles": [{"batch", "context", "how", "distinct_experts", "independent_experts",
    "step_us", "parts": [...]}]}.
    """
    with Progress(1 + len(settings.rows)) as progress:
        with progress(f"weights of {settings.name}"):
            model, tokenizer = load(settings)
        vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        profiles = []
        for context, batch in settings.rows:
            with progress(f"profile, batch {batch}, {context} keys"):
                profiles.append(_profile(model, vocab_size, batch, context, settings))
        return {"header": header(settings, model), "profiles": profiles}


def _profile(model: Any, vocab_size: int, batch: int, context: int, settings: DecodeSettings) -> Document:
    is_host = devices.accelerator(settings.device) is None
    settings = replace(settings, num_tokens=max(settings.num_tokens, _WARM + _STEPS))  # no sequence ends in the trace
    distinct: Distinct = {}

    def traced(**changes: Any) -> list[Event]:
        free(settings.device)  # memory of the previous engine
        llm = engine(model, batch, context, settings, run_ahead=False, **changes)

        def started() -> list[Seq]:
            return start(llm, vocab_size, batch, context, settings.num_tokens)

        sequences = started()
        events = _trace(llm)
        end(llm, sequences)
        if not distinct:
            distinct.update(count_experts(llm, started, _WARM + _STEPS))  # the same prompts once more
        return events

    with marked(model):
        events = traced(use_graphs=None if is_host else False)
    kernels, how = (step_trace.host_parts(events), "host") if is_host else (step_trace.kernels(events), "eager")
    if not is_host and devices.use_graphs(settings.device, settings.engine.use_graphs):
        kernels, how = _aligned(step_trace.kernels(traced()), kernels), "graph"
    calls = step_trace.num_calls(events) if is_host else Counter(kernel.part for kernel in kernels)
    seen = {kernel.part for kernel in kernels}
    mean_context = context + _WARM + _STEPS // 2
    needed = part_bytes(model, batch, mean_context, seen, settings.engine.kv_cache_dtype, distinct)
    parts = _parts(model, kernels, calls, needed, settings.device)
    return {
        "batch": batch,
        "context": context,
        "how": how,
        **expert_figures(model, batch, distinct),
        "step_us": sum(kernel.us for kernel in kernels) / _STEPS,
        "parts": parts,
    }


def _aligned(replayed: Sequence[Kernel], eager: Sequence[Kernel]) -> list[Kernel]:
    """Name the kernels of a replayed graph by aligning them with those of eager steps.

    Where all steps have the same number of kernels they are aligned step by step, which is much faster.
    """
    num_parts = _STEPS if not len(replayed) % _STEPS and not len(eager) % _STEPS else 1
    aligned: list[Kernel] = []
    for i in range(num_parts):
        part = (kernels[i * len(kernels) // num_parts :][: len(kernels) // num_parts] for kernels in (replayed, eager))
        aligned += step_trace.with_eager_parts(*part)
    return aligned


def _trace(llm: LLM) -> list[Event]:
    """Return the trace events of `_STEPS` steps, of the host and of the accelerator where there is one."""
    activities = [ProfilerActivity.CPU]
    if devices.accelerator(llm.runner.device) is not None:
        activities.append(getattr(ProfilerActivity, llm.runner.device.upper()))
    for _ in range(_WARM):
        llm.step()
    devices.synchronize(llm.runner.device)
    with profile(activities=activities) as profiler:
        for _ in range(_STEPS):
            with record_function(MARK + STEP):
                llm.step()
        devices.synchronize(llm.runner.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def _parts(
    model: Any, kernels: Sequence[Kernel], calls: Mapping[str, int], needed: dict[str, float], device: str
) -> list[Document]:
    """Return a row for each part, in the order of a layer."""
    rate, num_layers = copy_bandwidth(device), len(model.cache_specs())
    rows = []
    for part in sorted({kernel.part for kernel in kernels}, key=_place):
        of_part = [kernel for kernel in kernels if kernel.part == part]
        us = sum(kernel.us for kernel in of_part) / _STEPS
        by_name: dict[str, float] = defaultdict(float)
        for kernel in of_part:
            by_name[kernel.name] += kernel.us / _STEPS
        num_bytes = needed.get(part, 0.0)
        rows.append(
            {
                "part": part,
                "us": us,
                "us_per_layer": None if part in _ONCE else us / num_layers,
                "launches": calls.get(part, 0) / _STEPS,
                "bytes": num_bytes,
                "share_of_roofline": num_bytes / rate / (us * 1e-6) if num_bytes and us else None,
                "kernels": by_name,
            }
        )
    return rows


def _place(part: str) -> tuple[int, str]:
    return (_ORDER.index(part) if part in _ORDER else len(_ORDER), part)


def part_bytes(
    model: Any,
    batch: int,
    context: int,
    seen: set[str],
    kv_cache_dtype: str = "auto",
    distinct: Distinct | None = None,
) -> dict[str, float]:
    """Return the bytes that each part must move in a step.

    seen: the parts in the trace. Experts are one part, or two where their kernels can be told apart. distinct: as for
    `roofline.layer_bytes`.
    """
    specs = cache_specs(model, kv_cache_dtype)
    num_bytes = defaultdict[str, float](float, attention=batch * sum(spec.step_bytes(context) for spec in specs))
    modules = dict(model.named_modules())
    is_tied = "lm_head" not in modules
    for name, layer in weighted(model):
        part = part_of(name, modules[name]) or step_trace.OTHER
        if part == "embedding" and is_tied:
            part = HEAD  # a tied embedding is read as the head; its lookup is negligible
        read_bytes = layer_bytes(layer, batch, distinct)
        if part == EXPERTS and "experts down" in seen:
            up, down = (getattr(layer, proj).num_values for proj in ("gate_up_proj", "down_proj"))
            for half, values in (("experts gate/up", up), ("experts down", down)):
                num_bytes[half] += read_bytes * values / (up + down)
            continue
        num_bytes[part] += read_bytes
    return num_bytes
