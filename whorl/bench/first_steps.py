"""`whorl bench decode --first`: what a start takes, phase by phase, and whether steps behind it wait for anything.

The load is one of requests that come and go: twice as many as run at once, with prompts of a third of --context up to
all of it and answers of a fifth of --tokens up to all of them. It runs twice. Its steps are the same both times, so
what the first time takes longer was spent on compiling, recording and trying.
"""

import importlib
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from whorl import device as devices
from whorl.bench.columns import table
from whorl.bench.decode import DecodeSettings, header, load
from whorl.bench.decode_report import render_header
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.ops import _trial_store

CONTEXT, STEP_TOKENS = 1536, 2048  # where nobody asks for others
_SLOW = 2.0  # medians that a step may take beyond its repetition


class Late(NamedTuple):
    """Things that are done once and then kept; None: not to be known here."""

    graphs: int
    trials: int
    kernels: int | None


def late(llm: LLM) -> Late:
    return Late(len(llm.runner._graphs), _trial_store.num_trials(), compiled_kernels())


def compiled_kernels() -> int | None:
    """Triton's, in this process, from its cache on disk or anew; None where Triton keeps them otherwise."""
    if "triton" not in sys.modules:
        return 0
    kind = importlib.import_module("triton.runtime.jit").JITFunction
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("whorl.") and "triton" in name]
    functions = {id(each): each for module in ours for each in vars(module).values() if isinstance(each, kind)}
    try:
        return sum(len(kept[0]) for each in functions.values() for kept in each.device_caches.values())
    except (AttributeError, TypeError, KeyError):
        return None


def since_start() -> float | None:
    """Seconds that this process has run, where the system says."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def run(settings: DecodeSettings) -> Document:
    """{"header", "phases": [...], "warmup": ..., "load": {...}}."""
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
            found = _load(llm, settings)
        return {"header": header(settings, model), "phases": _named(phases), "warmup": _kind(llm), "load": found}


def _named(phases: list[tuple[str, float | None]]) -> list[Document]:
    return [{"phase": name, "seconds": seconds} for name, seconds in phases]


def _kind(llm: LLM) -> str:
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
        use_prefix_cache=False,  # or the second time would find the first one's prompts
        warm=False,
    )


def _warm_up(llm: LLM, settings: DecodeSettings) -> list[tuple[str, float | None]]:
    """Phases of it. Trials are made in the middle of steps, and counted by themselves."""
    before = _trial_store.seconds()
    kind = settings.engine.warmup or ("off" if devices.accelerator(settings.device) is None else "full")
    warmed = llm.warm_up(kind)
    tried = _trial_store.seconds() - before
    found = {f"warm-up: {phase}": seconds for phase, seconds in warmed.seconds.items()}
    if "warm-up: compile" in found:
        found["warm-up: compile"] -= tried
    return [*found.items(), ("warm-up: trials", tried)]


def _load(llm: LLM, settings: DecodeSettings) -> Document:
    first, again = (_steps(llm, settings) for _ in range(2))
    median = statistics.median(step["seconds"] for step in again)
    slow = []
    for number, (one, two) in enumerate(zip(first, again, strict=True)):
        if one["late"] or one["seconds"] - two["seconds"] > (_SLOW - 1) * max(median, two["seconds"]):
            slow.append({"step": number, **one, "again": two["seconds"]})
    times = sorted(step["seconds"] for step in first)
    return {
        "requests": 2 * max(settings.batches),
        "steps": len(first),
        "median_s": median,
        "p99_s": times[min(len(times) - 1, int(0.99 * len(times)))],
        "longest_s": times[-1],
        "first_s": sum(times),
        "again_s": sum(step["seconds"] for step in again),
        "late_steps": sum(bool(step["late"]) for step in first),
        "slow": slow,
    }


def _steps(llm: LLM, settings: DecodeSettings) -> list[Document]:
    """Every step of the load: its seconds, what ran in it, and what was done in it for good."""
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
    found, before = [], late(llm)
    devices.synchronize(settings.device)
    while llm.has_work:
        started = time.perf_counter()
        llm.step()
        seconds = time.perf_counter() - started
        now = late(llm)
        found.append({"seconds": seconds, "running": len(llm.scheduler.running), "late": _done(before, now)})
        before = now
    return found


def _done(before: Late, now: Late) -> list[str]:
    pairs = zip(Late._fields, before, now, strict=True)
    return [f"{(b or 0) - (a or 0)} {name}" for name, a, b in pairs if a != b]


def _timed(device: str, function: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    found = function()
    devices.synchronize(device)
    return time.perf_counter() - started, found


def is_good(document: Document) -> bool:
    """A full warm-up leaves nothing to compile, record or try."""
    return document["warmup"] != "full" or document["load"]["late_steps"] == 0


def render(document: Document) -> str:
    lines, found = render_header(document["header"]), document["load"]
    total = sum(row["seconds"] or 0.0 for row in document["phases"])
    cells = [["start", "seconds"]]
    cells += [[row["phase"], "-" if row["seconds"] is None else f"{row['seconds']:.2f}"] for row in document["phases"]]
    lines += ["", *table([*cells, ["together", f"{total:.2f}"]]), ""]
    times = f"median {found['median_s'] * 1e3:.1f} ms, p99 {found['p99_s'] * 1e3:.1f}, longest "
    times += f"{found['longest_s'] * 1e3:.1f}; {found['first_s']:.2f} s, and again {found['again_s']:.2f}"
    lines.append(f"load      {found['requests']} requests in {found['steps']} steps: {times}")
    lines.append(
        f"late      {found['late_steps']} steps compiled, recorded or tried something (warm-up {document['warmup']})"
    )
    for row in found["slow"][:20]:
        why = ", ".join(row["late"]) or "nothing that is done once"
        lines.append(
            f"          step {row['step']}: {row['seconds'] * 1e3:.1f} ms, again {row['again'] * 1e3:.1f}: {why}"
        )
    return "\n".join(lines)
