"""`whorl bench decode --draft-lengths`: what a step costs by tokens drafted, and the acceptance from which that pays.

Steps are the engine's own, over caches as full as `--context` says. Drafts are tokens that nobody would accept, so that
every step is one of its full length. Of a mixture of experts they read experts of their own, as drafts for text do,
only that neighbouring tokens of a text share some: these costs are the upper end. Plain decoding is timed as it runs
best, the next step launched before the last one's tokens are read, which drafting cannot do.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whorl import device as devices
from whorl.bench.columns import table
from whorl.bench.decode import DecodeSettings, engine, free, header, load, start
from whorl.bench.decode_report import render_header
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.engine.llm import LLM
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.speculate import Draft, Proposer

_STRIDE = 7919  # between the ids of tokens that only cost time
_MOST_ROWS = 2048  # of a step


def break_even(k: int, times: float) -> float | None:
    """The share of drafted tokens accepted, each given those before it, from which 1 + a + ... + a^k tokens are worth a
    step of `times` the plain one's cost; None: not even all of them are."""
    if times > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(middle**i for i in range(k + 1)) >= times else (middle, high)
    return round(high, 6)


def shown_share(share: float | None) -> str:
    return "never" if share is None else f"{math.ceil(100 * share)}%"


class Refused(Proposer):
    """Drafts tokens that a model says by chance only."""

    def __init__(self, k: int, vocab_size: int) -> None:
        self.k, self._vocab_size = k, vocab_size

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        return [Draft(self._tokens(seq, k)) for seq in sequences]

    def _tokens(self, seq: Seq, k: int) -> list[int]:
        return [(seq.id + (len(seq.token_ids) + i) * _STRIDE) % self._vocab_size for i in range(k)]


def run(settings: DecodeSettings, lengths: Sequence[int]) -> Document:
    """{"header": ..., "rows": [{"batch", "context", "k", "seconds", "times", "break_even", "mtp"}]}; k 0: plain. mtp:
    the same with drafts of the model's own layer of multi-token prediction, where it has one."""
    with Progress(1 + len(settings.rows) * (1 + len(lengths))) as progress:
        with progress(f"weights of {settings.name}"):
            model, tokenizer = load(settings)
            layer = _layer(model, settings)
        vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        rows = []
        for context, batch in settings.rows:
            with progress(f"plain, batch {batch}, {context} keys"):
                plain = _seconds(model, vocab_size, batch, context, settings, None)
                rows.append({"batch": batch, "context": context, "k": 0, **_found(0, plain, plain), "mtp": None})
            for k in lengths:
                with progress(f"drafts of {k}, batch {batch}, {context} keys"):
                    refused = Refused(k, vocab_size)
                    found = _found(k, _seconds(model, vocab_size, batch, context, settings, refused), plain)
                    mtp = None if layer is None else _with_layer(model, layer, vocab_size, batch, context, settings, k)
                    drafted = None if mtp is None else _found(k, mtp, plain)
                    rows.append({"batch": batch, "context": context, "k": k, **found, "mtp": drafted})
    return {"header": header(settings, model), "rows": rows}


def check(settings: DecodeSettings, lengths: Sequence[int]) -> None:
    """Refuse steps that the engine does not take as one."""
    most = max(settings.batches) * (1 + max(lengths))
    if most > _MOST_ROWS:
        raise ValueError(
            f"--draft-lengths: {max(lengths)} tokens for each of {max(settings.batches)} sequences are a step of "
            f"{most} rows, and a step has up to {_MOST_ROWS}: say shorter drafts, or fewer sequences by --batch"
        )


def _layer(model: Any, settings: DecodeSettings) -> Any:
    """Of multi-token prediction; None where the model has none."""
    if not getattr(model.config, "num_nextn_predict_layers", 0):
        return None
    from whorl.engine.weights import load_prediction, random_prediction

    return random_prediction(model) if settings.config is not None else load_prediction(settings.path, model)


def _found(k: int, seconds: float, plain: float) -> Document:
    times = seconds / plain
    return {"seconds": seconds, "times": times, "break_even": break_even(k, times) if k else None}


def _with_layer(
    model: Any, layer: Any, vocab_size: int, batch: int, context: int, settings: DecodeSettings, k: int
) -> float:
    from whorl.engine.speculate.mtp import MTP

    return _seconds(model, vocab_size, batch, context, settings, MTP(layer=layer, k=k))


def _seconds(
    model: Any, vocab_size: int, batch: int, context: int, settings: DecodeSettings, proposer: Proposer | None
) -> float:
    """Of a step, the median of runs; each takes the mean of as many steps as tokens were asked for."""
    free(settings.device)
    # Room behind the last step that is timed: a draft is never cut by a sequence's end.
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
    llm.step()  # what was launched ahead
    return seconds


def render(document: Document) -> str:
    rows, has_layer = document["rows"], any(row["mtp"] for row in document["rows"])
    more = ["with mtp: ms", "times plain", "pays from acceptance"] if has_layer else []
    cells = [["keys", "batch", "drafted", "ms/step", "times plain", "pays from acceptance", *more]]
    for row in rows:
        named = [str(row["context"]), str(row["batch"]), str(row["k"])]
        cells.append([*named, *_cells(row, row["k"]), *(_cells(row["mtp"], row["k"]) if has_layer else [])])
    note = "drafted: tokens a sequence; acceptance: of a token, those before it accepted"
    return "\n".join([*render_header(document["header"]), f"note      {note}", "", *table(cells)])


def _cells(found: Document | None, k: int) -> list[str]:
    if found is None:
        return ["-"] * 3
    paying = shown_share(found["break_even"]) if k else "-"
    return [f"{found['seconds'] * 1e3:.3f}", f"{found['times']:.2f}", paying]
