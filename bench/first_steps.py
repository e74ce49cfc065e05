"""`python -m bench.first_steps`: the time of a start by phase, and whether the first steps still do one-time work.

The load has twice as many requests as run at once, with prompts from a third of --context to all of it and outputs from
a fifth of --tokens to all of them. It runs twice with the same steps, so the extra time of the first run was spent on
one-time work: compiling kernels, recording graphs, and trials (checks of which library products have the right bits).
For a slow step the report also names what else takes time on the host: memory from the driver, garbage collection.
"""

import gc
import importlib
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from whorl import device as devices
from whorl.bench.decode_engine import DecodeSettings, header, load
from whorl.bench.decode_report import render_header
from whorl.bench.options import SET_BY_MEASUREMENT, DecodeOptions, not_of
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, table
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.ops import _trial_store
from whorl.options import Json, Model, Overrides, exit_on_bad_usage, expand_options

app = typer.Typer(add_completion=False)
CONTEXT, STEP_TOKENS = 1536, 2048  # defaults
_SLOW = 2.0  # a step is slow if it is longer than its second run by (_SLOW - 1) * max(second run, median step)


class OneTimeWork(NamedTuple):
    """Counts of work that is done once per process."""

    graphs: int
    trials: int
    kernels: Counter[str]  # by name


class HostWork(NamedTuple):
    """Counts of other work of the host that may delay a step, and the bytes that the allocator has from the driver."""

    allocations: int  # memory that the allocator got from the driver
    retries: int  # allocations for which cached memory was returned to the driver first
    collections: int  # of garbage, in all generations of objects
    reserved_bytes: int


def one_time_work(llm: LLM) -> OneTimeWork:
    """Return how much one-time work has been done so far."""
    num_graphs = len(llm.runner.graphs.decoding) + len(llm.runner.graphs.prompts)
    return OneTimeWork(num_graphs, _trial_store.num_trials(), compiled_kernels())


def host_work(device: str) -> HostWork:
    """Return how much other work the host has done so far; a device without an allocator of its own counts none."""
    module = devices.accelerator(device)
    stats: dict[str, int] = {} if module is None else module.memory_stats()
    return HostWork(
        stats.get("num_device_alloc", 0),
        stats.get("num_alloc_retries", 0),
        gc.get_stats()[-1]["collections"],
        stats.get("reserved_bytes.all.current", 0),
    )


def compiled_kernels() -> Counter[str]:
    """Return how many variants of each Triton kernel are loaded in this process."""
    if "triton" not in sys.modules:
        return Counter()
    launched = importlib.import_module("whorl.ops._launch_triton").Launched
    kind = importlib.import_module("triton.runtime.jit").JITFunction
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("whorl.") and "triton" in name]
    values = [value for module in ours for value in vars(module).values()]
    kernels = [value.kernel if isinstance(value, launched) else value for value in values]
    unique = {id(kernel): kernel for kernel in kernels if isinstance(kernel, kind)}
    counts: Counter[str] = Counter()
    for kernel in unique.values():
        counts[kernel.__name__] += sum(len(cache[0]) for cache in kernel.device_caches.values())
    return +counts


def since_start() -> float | None:
    """Return the seconds since this process started; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def run(settings: DecodeSettings) -> Document:
    """Time a start and the load; returns {"header", "phases": [...], "warmup": ..., "load": {...}}."""
    phases: list[tuple[str, float | None]] = [("interpreter and imports", since_start())]
    with Progress(4) as progress:
        with progress(f"weights of {settings.name}"):
            seconds, (model, tokenizer) = _timed(settings.device, lambda: load(settings))
            phases.append(("weights", seconds))
        with progress("engine"):
            seconds, llm = _timed(settings.device, lambda: _engine(model, tokenizer, settings))
            phases.append(("cache and runner", seconds))
        with progress("warm-up"):
            phases += _warm_up(llm, settings)
        with progress("mixed load, twice"):
            load_result = _load(llm, settings)
        return {
            "header": header(settings, model),
            "phases": _phase_rows(phases),
            "warmup": _warmup_kind(llm),
            "load": load_result,
        }


def _phase_rows(phases: list[tuple[str, float | None]]) -> list[Document]:
    return [{"phase": name, "seconds": seconds} for name, seconds in phases]


def _warmup_kind(llm: LLM) -> str:
    return "off" if llm.warmed is None else llm.warmed.kind


def _engine(model: Any, tokenizer: Any, settings: DecodeSettings) -> LLM:
    batch, step_tokens = max(settings.batches), settings.prompt_tokens or STEP_TOKENS
    length = max(settings.contexts, default=CONTEXT) + settings.num_tokens
    return LLM(
        model=model,
        tokenizer=tokenizer,
        settings=settings.engine,
        max_num_seqs=batch,
        max_num_batched_tokens=max(step_tokens, batch),
        max_prompt_tokens=step_tokens,
        max_model_len=length,
        num_blocks=batch * (1 + settings.num_blocks(model, length)),
        use_prefix_cache=False,  # else the second run would find the prompts of the first
        warm=False,
    )


def _warm_up(llm: LLM, settings: DecodeSettings) -> list[tuple[str, float | None]]:
    """Warm up the engine; returns its phases. Trials run inside other phases, and are counted separately."""
    before = _trial_store.seconds()
    kind = settings.engine.warmup or ("off" if devices.accelerator(settings.device) is None else "full")
    warmed = llm.warm_up(kind)
    tried = _trial_store.seconds() - before
    phases = {f"warm-up: {phase}": seconds for phase, seconds in warmed.seconds.items()}
    if "warm-up: compile" in phases:
        phases["warm-up: compile"] -= tried
    return [*phases.items(), ("warm-up: trials", tried)]


def _load(llm: LLM, settings: DecodeSettings) -> Document:
    """Run the load twice; returns the figures of the first run and its steps that were slow or did one-time work."""
    first, again = (_steps(llm, settings) for _ in range(2))
    median = statistics.median(s["seconds"] for s in again)
    slow = []
    for index, (step, repeated) in enumerate(zip(first, again, strict=True)):
        if step["late"] or step["seconds"] - repeated["seconds"] > (_SLOW - 1) * max(median, repeated["seconds"]):
            slow.append({"step": index, **step, "again": repeated["seconds"]})
    times = sorted(s["seconds"] for s in first)
    return {
        "requests": 2 * max(settings.batches),
        "steps": len(first),
        "median_s": median,
        "p99_s": times[min(len(times) - 1, int(0.99 * len(times)))],
        "longest_s": times[-1],
        "first_s": sum(times),
        "again_s": sum(s["seconds"] for s in again),
        "late_steps": sum(bool(s["late"]) for s in first),
        "slow": slow,
    }


def _steps(llm: LLM, settings: DecodeSettings) -> list[Document]:
    """Run the load; returns for every step its seconds, the running sequences, as "late" its one-time work, and as
    "beside" other work of the host."""
    rng = random.Random(0)
    longest, most = max(settings.contexts, default=CONTEXT), settings.num_tokens
    for _ in range(2 * max(settings.batches)):
        length = rng.randint(max(1, longest // 3), longest)
        prompt = [rng.randrange(llm.vocab_size) for _ in range(length)]
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.8)),
            top_p=0.95,
            max_tokens=rng.randint(max(1, most // 5), most),
            seed=rng.getrandbits(32),
            ignore_eos=True,
        )
        llm.add(prompt, params)
    steps, before, host_before = [], one_time_work(llm), host_work(settings.device)
    devices.synchronize(settings.device)
    while llm.has_work:
        started = time.perf_counter()
        llm.step()
        seconds = time.perf_counter() - started
        now, host_now = one_time_work(llm), host_work(settings.device)
        work = {"late": _new_work(before, now), "beside": _new_host_work(host_before, host_now)}
        steps.append({"seconds": seconds, "running": len(llm.scheduler.running), **work})
        before, host_before = now, host_now
    return steps


def _new_work(before: OneTimeWork, now: OneTimeWork) -> list[str]:
    """Return the work that was done between two counts as text, such as ["2 graphs", "1 kernels (_decode_kernel)"]."""
    counts = {"graphs": now.graphs - before.graphs, "trials": now.trials - before.trials}
    work = [f"{count} {name}" for name, count in counts.items() if count]
    kernels = now.kernels - before.kernels
    return [*work, f"{kernels.total()} kernels ({', '.join(sorted(kernels))})"] if kernels else work


def _new_host_work(before: HostWork, now: HostWork) -> list[str]:
    """Return what the host did between two counts as text."""
    work = []
    if now.allocations > before.allocations:
        grown = (now.reserved_bytes - before.reserved_bytes) / 2**20
        work.append(f"{now.allocations - before.allocations} allocations from the driver ({grown:+.0f} MiB)")
    if now.retries > before.retries:
        work.append(f"{now.retries - before.retries} of them after cached memory was returned")
    if now.collections > before.collections:
        work.append(f"{now.collections - before.collections} full garbage collections")
    return work


def _timed(device: str, function: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function()
    devices.synchronize(device)
    return time.perf_counter() - started, result


def is_good(document: Document) -> bool:
    """Return whether a full warm-up left no one-time work to the steps."""
    return document["warmup"] != "full" or document["load"]["late_steps"] == 0


def render(document: Document) -> str:
    """Return the document as text."""
    lines, result = render_header(document["header"]), document["load"]
    total = sum(row["seconds"] or 0.0 for row in document["phases"])
    cells = [["start", "seconds"]]
    cells += [[row["phase"], "-" if row["seconds"] is None else f"{row['seconds']:.2f}"] for row in document["phases"]]
    lines += ["", *table([*cells, ["total", f"{total:.2f}"]]), ""]
    times = f"median {result['median_s'] * 1e3:.1f} ms, p99 {result['p99_s'] * 1e3:.1f}, longest "
    times += f"{result['longest_s'] * 1e3:.1f}; {result['first_s']:.2f} s, and again {result['again_s']:.2f}"
    lines.append(f"load      {result['requests']} requests in {result['steps']} steps: {times}")
    lines.append(f"late      {result['late_steps']} steps did one-time work (warm-up {document['warmup']})")
    for row in result["slow"][:20]:
        why = ", ".join([*row["late"], *row["beside"]]) or "no one-time work"
        lines.append(
            f"          step {row['step']}: {row['seconds'] * 1e3:.1f} ms, again {row['again'] * 1e3:.1f}: {why}"
        )
    return "\n".join(lines)


@app.command()
@expand_options
def main(
    model: Model = None,
    *,
    options: Annotated[DecodeOptions, Overrides(without=not_of("peer", "classify", "profile", "repeats"))],
    engine: Annotated[EngineSettings, Overrides(without=SET_BY_MEASUREMENT)],
    as_json: Json = False,
) -> None:
    """Time the phases of a start, and the first steps of a mixed load after it."""
    with exit_on_bad_usage():
        settings = DecodeSettings.resolve(model, options, engine)
    finish(Benchmark(run=lambda: run(settings), render=render, is_good=is_good), as_json)


if __name__ == "__main__":
    app()
