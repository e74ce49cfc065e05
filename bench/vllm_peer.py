"""whorl beside vLLM on one GPU: random bf16 weights of a real shape, the same work, one engine after the other.

vLLM runs in the interpreter that `--peer` names, because its requirements are not ours:

    python -m venv peer && peer/bin/pip install vllm==0.26.0
    python -m bench.vllm_peer --peer peer/bin/python --out bench/results/vllm_h200.json

Each turn is a process of its own. Decoding counts the tokens after the first eight; the time of a prompt is that to its
first token. A mixed load is 256 requests at once, prompts of 512 to 1536 tokens and answers of 64 to 320.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from whorl.bench.provenance import provenance
from whorl.bench.random_config import PRESETS
from whorl.device import default_device

ENGINE = {"max_model_len": 36864, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
DECODE = [(1, 16, 256), (8, 16, 256), (64, 16, 256), (256, 16, 200), (1, 4096, 200), (1, 32768, 128), (64, 4096, 128)]
WORK: list[dict[str, Any]] = [
    *({"name": f"decode {b} x {k}", "kind": "decode", "sizes": [b, k, n], "turns": 2} for b, k, n in DECODE),
    *({"name": f"prompt of {n}", "kind": "prefill", "sizes": [n], "turns": 3} for n in (8192, 32768)),
    {"name": "mixed load", "kind": "mixed", "sizes": [256, 512, 1536, 64, 320], "turns": 2},
]
SIDES = ("whorl", "vllm", "vllm_invariant")


def turn(interpreter: str, side: str, config: dict[str, Any], asked: dict[str, Any]) -> dict[str, float]:
    """Run one side in a process of its own; returns tokens a second of each row."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        rows = Path(folder, "rows.json")
        rows.write_text(json.dumps(asked))
        program = Path(__file__).resolve().with_name("vllm_turn.py")
        root = {"PYTHONPATH": str(program.parents[1])} if side == "whorl" else {}
        command = [interpreter, str(program), side, folder, str(rows)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **root})
    if done.returncode:
        raise SystemExit(f"{side} ended with exit code {done.returncode}; its error is above")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the rows of every side as Markdown, with whorl's ratio to each other side."""
    others = [side for side in SIDES[1:] if side in rows]
    head = ["", "whorl", *(cell for side in others for cell in (side, "ratio"))]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, ours in rows["whorl"].items():
        cells = [name, f"{ours:.0f}"]
        for side in others:
            peer = rows[side].get(name)
            ratio = "" if peer is None else f"{peer / ours if name.startswith('ready') else ours / peer:.2f}"
            cells += ["-" if peer is None else f"{peer:.0f}", ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    peer: Annotated[str, typer.Option(help="An interpreter that has vLLM.")] = sys.executable,
    sides: Annotated[str, typer.Option(help="Which, with commas between them; whorl is one.")] = ",".join(SIDES),
    shape: Annotated[str, typer.Option(help="A preset of `whorl bench decode --random-config`.")] = "Qwen3-30B-A3B",
    turns: Annotated[int, typer.Option(min=1, help="Processes of each side; medians are reported.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A file for the document.")] = None,
) -> None:
    asked = {"engine": ENGINE, "work": WORK}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides.split(",")}
    for _ in range(turns):
        for side, results in found.items():
            results.append(turn(sys.executable if side == "whorl" else peer, side, PRESETS[shape], asked))
    rows = {side: {n: statistics.median(r[n] for r in results) for n in results[0]} for side, results in found.items()}
    print(table(rows))
    if out is not None:
        out.write_text(json.dumps(provenance(default_device()) | {"model": shape, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    app()
