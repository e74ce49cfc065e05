"""whorl beside llama.cpp on a CPU: one GGUF file, the same prompt ids and threads, one after the other, by turns.

Each turn is a process of its own, so that memory and a start are those of a user's. llama.cpp runs as the package
xllamacpp, in the interpreter that `--peer` names, because its requirements are not ours:

    python -m venv peer && peer/bin/pip install xllamacpp
    python -m bench.llama_cpp --peer peer/bin/python --out bench/results/cpu.md

Output tokens a second are counted from the first token of the last request to the last token; a prompt's time is that
to its first token. The share is that of the bytes a second which both threads read from memory, if a step read the file
once. `--busy` lets as many other processes compute all the time. `bench.random_gguf` writes files of other shapes.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.llama_cpp_turn import CASES
from whorl.bench.provenance import commit
from whorl.device import arithmetic_of
from whorl.engine.weights import resolve


def turn(interpreter: str, side: str, path: str, threads: int, cases: list[str]) -> dict[str, Any]:
    """Run one side in a process of its own and return what it measured."""
    program = str(Path(__file__).resolve().with_name("llama_cpp_turn.py"))
    command = [interpreter, program, side, path, str(threads), *cases]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} | ({"PYTHONPATH": root} if side == "ours" else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def copy_rate(threads: int) -> float:
    """Return the bytes a second that all threads read, in GB/s: what a decode step cannot exceed."""
    torch.set_num_threads(threads)
    x = torch.ones(1 << 26)
    best = min(_timed(x.sum) for _ in range(5))
    return x.nbytes / best / 1e9


def _timed(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes beside the turns that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()


def table(turns: dict[str, list[dict[str, Any]]], threads: int, num_bytes: int, note: str = "") -> str:
    """Return the medians as Markdown. num_bytes: of the file."""

    def median(side: str, *keys: str) -> float:
        values = [one[keys[0]][keys[1]] if len(keys) > 1 else one[keys[0]] for one in turns[side]]
        return statistics.median(values)

    identity = arithmetic_of("cpu") or {}
    reading = copy_rate(threads)
    lines = [
        f"CPU: {identity.get('device', platform.machine())}, {threads} threads, kernels {turns['ours'][0]['kernels']}.",
        f"Commit {commit()}, {len(turns['ours'])} turns, medians. Reading: {reading:.1f} GB/s.{note}",
        "",
        "| | whorl | llama.cpp | ratio | whorl's share of reading |",
        "|---|---|---|---|---|",
    ]
    for name, (count, _, answer) in CASES.items():
        if name not in turns["ours"][0]:
            continue
        key = "first" if answer <= 2 else "rate"
        ours, peer = median("ours", name, key), median("peer", name, key)
        unit, ratio = ("s", peer / ours) if key == "first" else ("tok/s", ours / peer)
        share = "" if key == "first" else f"{ours / count * num_bytes / reading / 1e9:.0%}"
        lines.append(f"| {name}, {unit} | {ours:.3g} | {peer:.3g} | {ratio:.2f} | {share} |")
    ours, peer = median("ours", "alone", "first"), median("peer", "alone", "first")
    lines.append(f"| first token of 20, s | {ours:.3g} | {peer:.3g} | {peer / ours:.2f} | |")
    for name, unit in (("start", "s"), ("memory", "MB")):
        ours, peer = median("ours", name), median("peer", name)
        lines.append(f"| {name}, {unit} | {ours:.3g} | {peer:.3g} | {peer / ours:.2f} | |")
    return "\n".join(lines)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    peer: Annotated[str, typer.Option(help="An interpreter that has xllamacpp.")] = sys.executable,
    model: Annotated[str, typer.Option(help="A .gguf file. Default: the default model.")] = "",
    threads: Annotated[int, typer.Option(min=1, help="Threads of both.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each; medians are reported.")] = 5,
    cases: Annotated[str, typer.Option(help="Which, with commas between them; `alone` is one of them.")] = ",".join(
        CASES
    ),
    busy: Annotated[bool, typer.Option("--busy", help="Beside as many processes as threads that compute.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file that the table is added to.")] = None,
) -> None:
    path = model or str(resolve(None))
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    note = " Beside processes that keep all cores busy." if busy else ""
    with busy_processes(threads if busy else 0):
        for number in range(turns):
            for side, interpreter in (("ours", sys.executable), ("peer", peer)):
                results[side].append(turn(interpreter, side, path, threads, cases.split(",")))
                print(number + 1, side, json.dumps(results[side][-1]), file=sys.stderr)
    text = table(results, threads, Path(path).stat().st_size, note)
    print(text)
    if out is not None:
        before = out.read_text() if out.exists() else "# whorl and llama.cpp on a CPU\n"
        out.write_text(f"{before}\n## {Path(path).stem}\n\n{text}\n")


if __name__ == "__main__":
    app()
