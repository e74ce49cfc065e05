"""Tables of figures and of files, written from bench/results and from the code so that a page cannot drift from them.

A page has a pair of comments, `<!-- figures: NAME -->` and `<!-- /figures -->`; what stands between them is replaced by
the table of that name. To show another run, change the key in its function here and run `make docs`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PACKAGE = Path(__file__).parents[2] / "whorl"
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def fill(text: str) -> str:
    """The page with every block of figures written anew. Raises KeyError for a block that no function here writes."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# ---- beside vLLM


def _vllm() -> str:
    rows = document("vllm_h200")["rows"]

    def cells(name: str, ours: float) -> list[str]:
        peers = (rows[side].get(name) for side in ("vllm", "vllm_invariant"))
        return [name, f"**{ours}**", *(cell for peer in peers for cell in _beside(ours, peer))]

    return _table(
        ["tok/s", "whorl", "vLLM", "ratio", "vLLM, batch-invariant", "ratio"],
        (cells(name, ours) for name, ours in rows["whorl"].items() if name != "ready, s"),
    )


def _beside(ours: float, peer: float | None) -> tuple[str, str]:
    return ("", "") if peer is None else (str(peer), f"{ours / peer:.2f}")


# ---- decode

# The run that holds each row: a key of few_rows_h200.json.
BESIDE = "beside transformers, at 75749f4"
DECODE_RUNS = {
    (1, 16): BESIDE,
    (1, 4096): "beside transformers, 4096 and 32768 keys, at 3b670b5",
    (1, 32768): "beside transformers, 4096 and 32768 keys, at 3b670b5",
    (2, 16): "beside transformers, 1 to 8 sequences, at 3b670b5",
    (8, 16): "beside transformers, 1 to 8 sequences, at 3b670b5",
    (64, 16): "beside transformers, 64 sequences, at 3b670b5",
    (256, 16): "1 to 256 sequences and prefill, at 75749f4",
    (4, 32768): "4 x 32768 keys, at 75749f4",
    (64, 4096): "64 x 4096 keys, at 75749f4",
    (16, 32768): "16 x 32768 keys, at 75749f4",
}


def decode_rows() -> dict[tuple[int, int], dict[str, Any]]:
    """The figures of decoding Qwen3-30B-A3B by (sequences, keys)."""
    runs = document("few_rows_h200")
    return {size: _rows_of(runs[run]["decode"], *size)[0] for size, run in DECODE_RUNS.items()}


def _rows_of(rows: list[dict[str, Any]], batch: int, context: int) -> list[dict[str, Any]]:
    return [row for row in rows if (row["batch"], row.get("context", 16)) == (batch, context)]


def transformers_tok_s(batch: int, context: int) -> float | None:
    """The faster of transformers' ways, eager and compiled with a static cache, in the same run as our row."""
    run = document("few_rows_h200")[DECODE_RUNS[batch, context]]
    rows = _rows_of(run["peers"], batch, context)
    return max((row["tok_s"] for row in rows if "tok_s" in row), default=None)  # one that failed has a note instead


def _decode() -> str:
    def cells(batch: int, context: int, row: dict[str, Any]) -> list[str]:
        peer = transformers_tok_s(batch, context)
        share = f"{100 * row['tok_s'] / row['limit_tok_s']:.0f}%"
        beside = f"{peer:.0f}" if peer else "not in this run"
        return [str(batch), str(context), f"**{row['tok_s']:.0f}**", beside, f"{row['limit_tok_s']:.0f}", share]

    return _table(
        ["sequences", "keys of each", "whorl, tok/s", "transformers", "limit by bytes", "of the limit"],
        (cells(*size, row) for size, row in decode_rows().items()),
    )


# ---- prefill


# The runs that hold the rows: keys of few_rows_h200.json. The first has the peer in it.
_PREFILL_RUNS = (
    "beside transformers, prompts by the copy engine",
    "prefill of 32768 tokens, prompts by the copy engine",
)


def _prefill() -> str:
    def rows() -> Iterator[list[str]]:
        for name in _PREFILL_RUNS:
            run = document("few_rows_h200")[name]
            row, peer = run["prefill"], run["peer_prefill"]
            yield [
                str(row["prompt_tokens"]),
                f"**{row['tok_s']:.0f}**",
                f"{peer['tok_s']:.0f}" if peer else "not in this run",
                f"{row['tflop_s']:.0f}",
                f"{row['matmul_tflop_s']:.0f}",
            ]

    head = ["prompt tokens", "whorl, tok/s", "transformers", "whorl, TFLOP/s", "one large product, TFLOP/s"]
    return _table(head, rows())


# ---- operators

_OPERATORS = (
    ("`rope`, 16384 tokens, 32+4 heads", "rope", "16384 tokens, 32+4 heads x 128"),
    ("`rope`, 16384 tokens, 64+4 heads", "rope", "16384 tokens, 64+4 heads x 128"),
    ("`rope` backward, 64+4 heads", "rope_backward", "16384 tokens, 64+4 heads x 128"),
    ("`qk_norm_rope`, 32+4 heads", "qk_norm_rope", "16384 tokens, 32+4 heads x 128"),
    ("`rms_norm`, 4096 x 7168", "rms_norm", "4096x7168"),
    ("`add_rms_norm`, 4096 x 7168", "add_rms_norm", "4096x7168"),
)


def operator_rows() -> Iterator[tuple[str, float, float | None, float | None, float]]:
    """Label, then microseconds of whorl, of the fastest torch.compile, of the fastest Liger and of a plain copy."""
    rows = {(row["op"], row["case"]): row for row in document("ops_h200")["rows"]}
    for label, op, case in _OPERATORS:
        row = rows[op, case]
        yield label, row["us"], _fastest(row, "torch.compile"), _fastest(row, "Liger"), row["copy_us"]


def _fastest(row: dict[str, Any], name: str) -> float | None:
    times = [peer["us"] for peer in row["peers"] if name in peer["label"]]
    return min(times, default=None)


def _operators() -> str:
    def rows() -> Iterator[list[str]]:
        for label, ours, compiled, liger, copy in operator_rows():
            fastest = min(time for time in (ours, compiled, liger) if time is not None)
            cells = [_bold(f"{time:.1f}", time == fastest) if time else "-" for time in (ours, compiled, liger)]
            yield [label, *cells, f"{copy:.1f}"]

    return _table(["", "whorl", "torch.compile", "Liger", "copy of as many bytes"], rows())


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


# ---- training

# A label, then the runs of training_h200.json and the name of the row that hold it; the last row found counts.
_TRAINING = (
    ("transformers", ("train_4k",), "transformers", 4096),
    ("whorl, plain operators", ("train_4k",), "small", 4096),
    ("whorl, fused", ("train_4k",), "kernels", 4096),
    ("whorl, fused, 32768 tokens", ("train_long", "long8"), "kernels", 32768),
)


def training_row(runs: Sequence[str], name: str, layers: int, seq: int) -> dict[str, Any]:
    rows = [row for run in runs for row in document("training_h200")[run]["rows"]]
    return [row for row in rows if (row["row"], row["layers"], row["seq"]) == (name, layers, seq)][-1]


def _training() -> str:
    def rows() -> Iterator[list[str]]:
        for label, runs, name, seq in _TRAINING:
            yield [label, *(_speed(training_row(runs, name, layers, seq)) for layers in (4, 8))]

    return _table(["", "4 layers", "8 layers"], rows())


def _speed(row: dict[str, Any]) -> str:
    if row.get("tok_s") is None:
        return "out of memory"
    notes = ", activation checkpointing" if "checkpoint" in row["switches"] else ""
    return f"{row['tok_s']:.0f} tok/s, {row['allocated_bytes'] / 2**30:.1f} GiB{notes}"


# ---- the files of a token

# In the order of docs/read_the_code.md: file, what to read it for.
_CODE = (
    ("engine/llm.py", "`LLM`: a step, and what a caller uses"),
    ("engine/sequence.py", "`Sequence`: a prompt and its tokens"),
    ("engine/scheduler.py", "`Scheduler`: the tokens of the next step"),
    ("engine/blocks.py", "`BlockPool`: the blocks of the KV cache, and shared prefixes"),
    ("engine/batch.py", "`Batch`: chunks become indices"),
    ("engine/call.py", "`Call`: the arrays of one forward call"),
    ("engine/runner.py", "`Runner`: forward calls, as graphs where there are any"),
    ("models/llama.py", "`Llama`: the model that the other families subclass"),
    ("nn/linear.py", "`Linear`: the matmul of a layer"),
    ("nn/attention.py", "`Rope`, `attend`: positions and attention"),
    ("ops/glu.py", "`glu`: an operator, its reference and its backends"),
    ("engine/sampler.py", "`Sampler`: from sampled tokens to accepted ones"),
)


def _code() -> str:
    def rows() -> Iterator[list[str]]:
        total = 0
        for number, (name, purpose) in enumerate(_CODE, 1):
            num_lines = len((PACKAGE / name).read_text().splitlines())
            total += num_lines
            yield [str(number), f"[whorl/{name}](../whorl/{name})", str(num_lines), purpose]
        yield ["", "together", f"**{total}**", ""]

    return _table(["", "file", "lines", "read it for"], rows())


TABLES: dict[str, Callable[[], str]] = {
    "vllm": _vllm,
    "decode": _decode,
    "prefill": _prefill,
    "operators": _operators,
    "training": _training,
    "code": _code,
}
