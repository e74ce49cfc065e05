"""`python -m bench.draft_sweep`: prompt lookup over draft lengths, or with `--verify` the time of a step by tokens."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import typer

from bench.draft_lengths import break_even, shown_share
from whorl.bench.classify import OK, Run, Subject, answer, classify
from whorl.bench.decode_engine import DecodeSettings, header, load
from whorl.bench.decode_report import render_header
from whorl.bench.options import SET_BY_MEASUREMENT, DecodeOptions, not_of
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, table
from whorl.engine.drafting import DraftOptions
from whorl.engine.llm import LLM
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate import Proposer
from whorl.options import Json, Model, Overrides, exit_on_bad_usage, expand_options

app = typer.Typer(add_completion=False)
NOT_OURS = not_of("peer", "classify", "profile", "context", "prompt_tokens")


def parse_sweep(text: str) -> dict[str, list[int]]:
    """Return the lengths of a text such as k=2,4,8,ngram=1,2; raises ValueError for anything else."""
    lengths: dict[str, list[int]] = {}
    try:
        for part in text.replace(" ", ",").split(","):
            name, equals, value = part.rpartition("=")
            if equals:
                lengths[name] = []
            lengths[name if equals else next(reversed(lengths))].append(int(value))
    except (ValueError, StopIteration):
        lengths = {}
    if set(lengths) - {"k", "ngram"} or not lengths or min(min(values) for values in lengths.values()) < 1:
        raise ValueError(f"--lengths is {text}, expected lengths such as k=2,4,8,ngram=1,2,3")
    return {"k": [10], "ngram": [1]} | lengths


def sweep(settings: DecodeSettings, lengths: Mapping[str, Iterable[int]], drafting: DraftOptions) -> Document:
    """Run prompt lookup with each pair of lengths; drafts have fixed length.

    Returns {"header": ..., "plain_tok_s": ..., "rows": [{"k", "ngram", "tok_s", ...}]}.
    """
    pairs = [(k, ngram) for k in lengths["k"] for ngram in lengths["ngram"]]
    with Progress(2 + len(pairs)) as progress:
        with progress(f"weights of {settings.name}"):
            subject = Subject(settings, 1)
        with progress("plain"):
            plain = _answers(subject, None)
        rows = []
        for k, ngram in pairs:
            with progress(f"k={k}, ngram={ngram}"):
                runs = _answers(subject, drafting.lookup(k=k, ngram=ngram))
                rows.append({"k": k, "ngram": ngram, **_compare(plain, runs)})
    return {"header": header(settings, subject.model), "plain_tok_s": _sound_speed(plain), "rows": rows}


def _answers(subject: Subject, proposer: Proposer | None) -> list[Run]:
    llm = subject.engine(proposer, is_fixed=True)
    answer(llm, subject.prompts[0][1], 4)  # warm up
    settings = subject.settings
    return [answer(llm, ids, settings.num_tokens) for _ in range(settings.repeats) for _, ids in subject.prompts]


def _compare(plain: Sequence[Run], runs: Sequence[Run]) -> Document:
    drafted, accepted = (sum(getattr(run, counter).total() for run in runs) for counter in ("drafted", "accepted"))
    return {
        "tok_s": _sound_speed(runs),
        "equal": all(a.token_ids == b.token_ids for a, b in zip(plain, runs, strict=True)),
        "acceptance": accepted / drafted if drafted else None,
        "ok": sum(classify(run.token_ids) == OK for run in runs),
        "runs": len(runs),
    }


def _sound_speed(runs: Sequence[Run]) -> float | None:
    """Return the median speed of the runs whose output is OK; None without any."""
    return statistics.median(speeds) if (speeds := [r.tok_s for r in runs if classify(r.token_ids) == OK]) else None


def render_sweep(document: Document) -> str:
    """Return the document of `sweep` as text."""
    lines, rows = render_header(document["header"]), document["rows"]
    plain = document["plain_tok_s"]
    lines += [
        "",
        f"plain     {_tok_s(plain)} tok/s; each cell: tok/s of outputs that are OK, speed-up over plain, acceptance",
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
    """Time a step by the number of tokens it verifies; returns {"header": ..., "seconds": {tokens: s}}."""
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
    """Return the document of `verify` as text."""
    first, *_ = document["seconds"].values()
    cells = [["tokens", "ms", "times one", "pays from acceptance"]]
    for tokens, seconds in document["seconds"].items():
        cells.append(
            [str(tokens), f"{seconds * 1e3:.3f}", f"{seconds / first:.2f}", _break_even(tokens, seconds / first)]
        )
    return "\n".join([*render_header(document["header"]), "", *table(cells)])


def _break_even(tokens: int, cost: float) -> str:
    return "-" if tokens == 1 else shown_share(break_even(tokens - 1, cost))


@app.command()
@expand_options
def main(
    model: Model = None,
    *,
    lengths: Annotated[
        str, typer.Option(metavar="k=..,ngram=..", help="Lengths of drafts and of n-grams to tabulate.")
    ] = "k=2,4,8,ngram=1,2,3",
    is_verifying: Annotated[
        bool, typer.Option("--verify", help="Time a step by the number of tokens it verifies, those of --batch.")
    ] = False,
    options: Annotated[DecodeOptions, Overrides(defaults={"batch": "1..8"}, without=NOT_OURS)],
    drafting: Annotated[DraftOptions, Overrides(without={"pld": "drafts are by prompt lookup"})],
    engine: Annotated[EngineSettings, Overrides(without=SET_BY_MEASUREMENT)],
    as_json: Json = False,
) -> None:
    """Tabulate prompt lookup over draft lengths and n-gram lengths, or time a step by the tokens it verifies."""
    with exit_on_bad_usage():
        table_lengths = parse_sweep(lengths)
        if options.random_config is not None and not is_verifying:
            raise ValueError("--lengths needs a trained MODEL; random weights generate no text to classify")
        settings = DecodeSettings.resolve(model, options, engine)
    if is_verifying:
        finish(Benchmark(run=lambda: verify(settings), render=render_verify), as_json)
    tabulate = Benchmark(run=lambda: sweep(settings, table_lengths, drafting), render=render_sweep, is_good=is_good)
    finish(tabulate, as_json)


def is_good(document: Document) -> bool:
    """Return whether speculation changed no output."""
    return all(row["equal"] for row in document["rows"])


if __name__ == "__main__":
    app()
