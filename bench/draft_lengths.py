"""`python -m bench.draft_lengths`: the time of a step by tokens drafted, and the acceptance from which that pays.

Steps are real steps of the engine, over caches filled to `--context` keys. Drafts are tokens that the model rejects, so
that every step verifies a full draft. In a mixture of experts each drafted token reads other experts; neighbouring
tokens of real text share some, so these costs are an upper bound. Plain decoding is timed with run-ahead (the next step
is launched before the tokens of the last one are read), which drafting cannot use.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from whorl import device as devices
from whorl.bench.decode_engine import DecodeSettings, engine, free, header, load, start
from whorl.bench.decode_report import render_header
from whorl.bench.options import SET_BY_MEASUREMENT, DecodeOptions, not_of, parse_counts
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, table
from whorl.engine.llm import LLM
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate import Draft, Proposer
from whorl.options import Json, Model, Overrides, exit_on_bad_usage, expand_options

app = typer.Typer(add_completion=False)
NOT_OURS = not_of("peer", "classify", "profile", "prompt_tokens")
_STRIDE = 7919  # between the ids of drafted tokens, which are meant to be rejected
_MOST_ROWS = 2048  # tokens of a step


def break_even(k: int, times: float) -> float | None:
    """Return the acceptance from which drafting k tokens pays; None where even full acceptance does not.

    times: the cost of the step over that of plain decoding. Acceptance a is the probability that a drafted token is
    accepted when those before it are, so a step yields 1 + a + ... + a^k tokens, which must be at least `times`.
    """
    if times > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(middle**i for i in range(k + 1)) >= times else (middle, high)
    return round(high, 6)


def shown_share(share: float | None) -> str:
    """Return an acceptance as text, rounded up to a percent; "never" for None."""
    return "never" if share is None else f"{math.ceil(100 * share)}%"


class RejectedProposer(Proposer):
    """Drafts tokens that the model accepts only by chance."""

    def __init__(self, k: int, vocab_size: int) -> None:
        self.k, self._vocab_size = k, vocab_size

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        return [Draft(self._tokens(seq, k)) for seq in sequences]

    def _tokens(self, seq: Seq, k: int) -> list[int]:
        return [(seq.id + (len(seq.token_ids) + i) * _STRIDE) % self._vocab_size for i in range(k)]


def run(settings: DecodeSettings, lengths: Sequence[int]) -> Document:
    """Time steps with drafts of each length.

    Returns {"header": ..., "rows": [{"batch", "context", "k", "seconds", "times", "break_even", "mtp"}]}. k is 0 for
    plain decoding; mtp has the same figures with drafts of the model's multi-token prediction layer, where it has one.
    """
    with Progress(1 + len(settings.rows) * (1 + len(lengths))) as progress:
        with progress(f"weights of {settings.name}"):
            model, tokenizer = load(settings)
            layer = _mtp_layer(model, settings)
        vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        rows = []
        for context, batch in settings.rows:
            with progress(f"plain, batch {batch}, {context} keys"):
                plain = _seconds(model, vocab_size, batch, context, settings, None)
                rows.append({"batch": batch, "context": context, "k": 0, **_result(0, plain, plain), "mtp": None})
            for k in lengths:
                with progress(f"drafts of {k}, batch {batch}, {context} keys"):
                    rejected = RejectedProposer(k, vocab_size)
                    drafted_row = _result(k, _seconds(model, vocab_size, batch, context, settings, rejected), plain)
                    mtp_seconds = (
                        None if layer is None else _mtp_seconds(model, layer, vocab_size, batch, context, settings, k)
                    )
                    mtp_row = None if mtp_seconds is None else _result(k, mtp_seconds, plain)
                    rows.append({"batch": batch, "context": context, "k": k, **drafted_row, "mtp": mtp_row})
    return {"header": header(settings, model), "rows": rows}


def check(settings: DecodeSettings, lengths: Sequence[int]) -> None:
    """Raise ValueError when the drafts are more tokens than the engine takes in one step."""
    most = max(settings.batches) * (1 + max(lengths))
    if most > _MOST_ROWS:
        raise ValueError(
            f"--lengths: {max(lengths)} tokens for each of {max(settings.batches)} sequences are a step of "
            f"{most} tokens, expected at most {_MOST_ROWS}; give shorter drafts, or fewer sequences with --batch"
        )


def _mtp_layer(model: Any, settings: DecodeSettings) -> Any:
    """Return the model's multi-token prediction layer; None where it has none."""
    if not getattr(model.config, "num_nextn_predict_layers", 0):
        return None
    from whorl.engine.weights import load_prediction, random_prediction

    return random_prediction(model) if settings.config is not None else load_prediction(settings.path, model)


def _result(k: int, seconds: float, plain: float) -> Document:
    """Return the fields of a step of `seconds` with k tokens drafted; plain: seconds of a step without drafts."""
    times = seconds / plain
    return {"seconds": seconds, "times": times, "break_even": break_even(k, times) if k else None}


def _mtp_seconds(
    model: Any, layer: Any, vocab_size: int, batch: int, context: int, settings: DecodeSettings, k: int
) -> float:
    from whorl.engine.speculate.mtp import MTP

    return _seconds(model, vocab_size, batch, context, settings, MTP(layer=layer, k=k))


def _seconds(
    model: Any, vocab_size: int, batch: int, context: int, settings: DecodeSettings, proposer: Proposer | None
) -> float:
    """Return the median seconds of a step over the runs; a run is the mean over `num_tokens` steps."""
    free(settings.device)
    # Leave room after the last timed step, so that the end of a sequence never shortens a draft.
    longer = replace(settings, num_tokens=settings.num_tokens + (0 if proposer is None else proposer.k) + 1)
    llm = engine(model, batch, context, longer, speculate=proposer, draft_length="fixed")
    runs = [_time(llm, vocab_size, batch, context, settings, longer.num_tokens) for _ in range(settings.repeats + 1)]
    return statistics.median(runs[1:])


def _time(llm: LLM, vocab_size: int, batch: int, context: int, settings: DecodeSettings, most: int) -> float:
    sequences = start(llm, vocab_size, batch, context, most)
    devices.synchronize(settings.device)
    before, started = llm.num_steps, time.perf_counter()
    while llm.num_steps - before < settings.num_tokens and llm.has_work:
        llm.step()
    devices.synchronize(settings.device)
    seconds = (time.perf_counter() - started) / (llm.num_steps - before)
    for seq in sequences:
        llm.abort(seq)
    llm.step()  # finish the step that was launched ahead
    return seconds


def render(document: Document) -> str:
    """Return the document as text."""
    rows, has_layer = document["rows"], any(row["mtp"] for row in document["rows"])
    more = ["with mtp: ms", "times plain", "pays from acceptance"] if has_layer else []
    cells = [["keys", "batch", "drafted", "ms/step", "times plain", "pays from acceptance", *more]]
    for row in rows:
        named = [str(row["context"]), str(row["batch"]), str(row["k"])]
        cells.append([*named, *_cells(row, row["k"]), *(_cells(row["mtp"], row["k"]) if has_layer else [])])
    note = "drafted: tokens per sequence; acceptance: of a token when those before it are accepted"
    return "\n".join([*render_header(document["header"]), f"note      {note}", "", *table(cells)])


def _cells(result: Document | None, k: int) -> list[str]:
    if result is None:
        return ["-"] * 3
    paying = shown_share(result["break_even"]) if k else "-"
    return [f"{result['seconds'] * 1e3:.3f}", f"{result['times']:.2f}", paying]


@app.command()
@expand_options
def main(
    model: Model = None,
    *,
    lengths: Annotated[str, typer.Option(metavar="N,N", help="Tokens drafted for each sequence.")] = "1,2,3,4,8",
    options: Annotated[DecodeOptions, Overrides(defaults={"batch": "1"}, without=NOT_OURS)],
    engine: Annotated[EngineSettings, Overrides(without=SET_BY_MEASUREMENT)],
    as_json: Json = False,
) -> None:
    """Time a step by tokens drafted, and give the acceptance from which drafting pays."""
    with exit_on_bad_usage():
        settings = DecodeSettings.resolve(model, options, engine)
        counts = parse_counts(lengths, "--lengths")
        check(settings, counts)
    finish(Benchmark(run=lambda: run(settings, counts), render=render), as_json)


if __name__ == "__main__":
    app()
