"""`whorl bench decode --sweep` and `--verify`: prompt lookup over lengths, and what a step costs by tokens checked."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from whorl.bench.classify import OK, Run, Subject, answer, classify
from whorl.bench.columns import table
from whorl.bench.decode import DecodeSettings, header, load
from whorl.bench.decode_report import render_header
from whorl.bench.draft_lengths import break_even, shown_share
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.engine.drafting import DraftOptions
from whorl.engine.llm import LLM
from whorl.engine.speculate import Proposer


def parse_sweep(text: str) -> dict[str, list[int]]:
    """k=2,4,8,ngram=1,2: what to try of each."""
    found: dict[str, list[int]] = {}
    try:
        for part in text.replace(" ", ",").split(","):
            name, equals, value = part.rpartition("=")
            if equals:
                found[name] = []
            found[name if equals else next(reversed(found))].append(int(value))
    except (ValueError, StopIteration):
        found = {}
    if set(found) - {"k", "ngram"} or not found or min(min(values) for values in found.values()) < 1:
        raise ValueError(f"--sweep {text}: expected lengths such as k=2,4,8,ngram=1,2,3")
    return {"k": [10], "ngram": [1]} | found


def sweep(settings: DecodeSettings, asked: Mapping[str, Iterable[int]], drafting: DraftOptions) -> Document:
    """Drafts of fixed length: {"header": ..., "plain_tok_s": ..., "rows": [{"k", "ngram", "tok_s", ...}]}."""
    pairs = [(k, ngram) for k in asked["k"] for ngram in asked["ngram"]]
    with Progress(2 + len(pairs)) as progress:
        with progress(f"weights of {settings.name}"):
            subject = Subject(settings, 1)
        with progress("plain"):
            plain = _answers(subject, None)
        rows = []
        for k, ngram in pairs:
            with progress(f"k={k}, ngram={ngram}"):
                found = _answers(subject, drafting.lookup(k=k, ngram=ngram))
                rows.append({"k": k, "ngram": ngram, **_swept(plain, found)})
    return {"header": header(settings, subject.model), "plain_tok_s": _sound_speed(plain), "rows": rows}


def _answers(subject: Subject, proposer: Proposer | None) -> list[Run]:
    llm = subject.engine(proposer, is_fixed=True)
    answer(llm, subject.prompts[0][1], 4)  # warm up
    settings = subject.settings
    return [answer(llm, ids, settings.num_tokens) for _ in range(settings.repeats) for _, ids in subject.prompts]


def _swept(plain: Sequence[Run], found: Sequence[Run]) -> Document:
    tried, kept = (sum(getattr(run, what).total() for run in found) for what in ("drafted", "accepted"))
    return {
        "tok_s": _sound_speed(found),
        "equal": all(a.token_ids == b.token_ids for a, b in zip(plain, found, strict=True)),
        "acceptance": kept / tried if tried else None,
        "ok": sum(classify(run.token_ids) == OK for run in found),
        "runs": len(found),
    }


def _sound_speed(runs: Sequence[Run]) -> float | None:
    """Median of those whose output is OK."""
    return statistics.median(found) if (found := [r.tok_s for r in runs if classify(r.token_ids) == OK]) else None


def render_sweep(document: Document) -> str:
    lines, rows = render_header(document["header"]), document["rows"]
    plain = document["plain_tok_s"]
    lines += [
        "",
        f"plain     {_tok_s(plain)} tok/s; below: tok/s of outputs that are OK, times plain, share accepted",
        "",
    ]
    ngrams = list(dict.fromkeys(row["ngram"] for row in rows))
    cells = [["k", *(f"ngram {n}" for n in ngrams)]]
    for k in dict.fromkeys(row["k"] for row in rows):
        cells.append([str(k), *(_sweep_cell(row, plain) for row in rows if row["k"] == k)])
    return "\n".join([*lines, *table(cells)])


def _sweep_cell(row: Document, plain: float | None) -> str:
    times = f" {row['tok_s'] / plain:.2f}x" if row["tok_s"] and plain else ""
    share = "nothing drafted" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
    return f"{_tok_s(row['tok_s'])}{times} {share}{'' if row['equal'] else ' WRONG'}"


def _tok_s(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def verify(settings: DecodeSettings) -> Document:
    """What a step costs by the number of tokens it checks: {"header": ..., "seconds": {rows: s}}."""
    with Progress(2) as progress:
        with progress(f"weights of {settings.name}"):
            model = load(settings)[0]
            length = 256
            llm = LLM(
                model=model,
                settings=settings.engine,
                max_num_seqs=1,
                max_model_len=length,
                num_blocks=settings.num_blocks(model, length),
            )
        with progress("steps"):
            seconds = llm.runner.cost(settings.batches, repeats=settings.repeats)
    return {"header": header(settings, model), "seconds": seconds}


def render_verify(document: Document) -> str:
    first, *_ = document["seconds"].values()
    cells = [["tokens", "ms", "times one", "pays from acceptance"]]
    for rows, seconds in document["seconds"].items():
        cells.append([str(rows), f"{seconds * 1e3:.3f}", f"{seconds / first:.2f}", _break_even(rows, seconds / first)])
    return "\n".join([*render_header(document["header"]), "", *table(cells)])


def _break_even(rows: int, cost: float) -> str:
    return "-" if rows == 1 else shown_share(break_even(rows - 1, cost))
