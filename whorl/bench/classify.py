"""`whorl bench decode --classify`: the speed of speculation, and whether the generated text is sound.

A model that repeats itself is easy to draft for, so a speed means little without a look at the output. The output of
every run is classified and compared with that of plain decoding; sound and degraded outputs get separate speeds.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whorl.bench.decode_engine import DecodeSettings, header, load
from whorl.bench.decode_report import render_header
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, Column, columns
from whorl.engine.drafting import DraftOptions
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate import Proposer

PROMPTS = {
    "structured": (
        "Write a five paragraph essay about why cities should plant more trees.",
        "Explain step by step how rain forms, as a numbered list with one sentence for each step.",
    ),
    "creative": (
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        "Describe a market on the moon, with its sounds, smells and people.",
    ),
    "factual": (
        "What are the planets of the solar system, in order from the Sun?",
        "Who wrote Romeo and Juliet, when, and what is it about?",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number, with a docstring and three tests.",
        "Write an HTML page with a form that has fields for a name, an e-mail address and a message.",
    ),
}
OK, LOW_DIVERSITY = "OK", "LOW_DIVERSITY"
_LONGEST_LOOP = 32  # tokens of one repetition
_LOOP_TOKENS = 24  # a loop is at least this many tokens at the end, and at least 4 repetitions
_LEAST_DISTINCT = 0.5  # share of distinct bigrams; ordinary text has 0.8 and more
_SHORT = 32  # shorter outputs are not judged by diversity


def classify(token_ids: Sequence[int]) -> str:
    """Return OK; LOOP_N where the output ends in a repetition of N tokens; LOW_DIVERSITY where few bigrams differ."""
    for size in range(1, _LONGEST_LOOP + 1):
        count = max(4 * size, _LOOP_TOKENS)
        tail = token_ids[-count:]
        if len(tail) == count and all(a == b for a, b in zip(tail, tail[size:], strict=False)):
            return f"LOOP_{size}"
    is_low = len(token_ids) >= _SHORT and distinct(token_ids, 2) < _LEAST_DISTINCT
    return LOW_DIVERSITY if is_low else OK


def distinct(token_ids: Sequence[int], n: int) -> float:
    """Return the share of distinct n-grams; 1 where there are no n-grams."""
    ngrams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


@dataclass(slots=True)
class Run:
    """One generation: its tokens, its speed, and how often each position of a draft was drafted and accepted."""

    token_ids: list[int] = field(default_factory=list)
    tok_s: float = 0.0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


def answer(llm: LLM, prompt: list[int], max_tokens: int) -> Run:
    """Generate greedily from a prompt, and count drafted and accepted tokens."""
    (seq,) = llm.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    run = Run()
    while llm.has_work:
        drafted, accepted = seq.num_drafted, seq.num_accepted
        llm.step()
        run.drafted.update(range(seq.num_drafted - drafted))
        run.accepted.update(range(seq.num_accepted - accepted))
    run.token_ids, run.tok_s = seq.output_ids, seq.timings.tokens_per_second or 0.0
    return run


class Subject:
    """A model and its prompts; several engines can share the model."""

    def __init__(self, settings: DecodeSettings, num_prompts: int) -> None:
        self.settings = settings
        self.model, self.tokenizer = load(settings)
        self.prompts = [(name, self._encode(text)) for name, texts in PROMPTS.items() for text in texts[:num_prompts]]

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode_chat([{"role": "user", "content": text}])  # type: ignore[no-any-return]
        except ValueError:  # no chat template
            return self.tokenizer.encode(text)  # type: ignore[no-any-return]

    def engine(self, speculate: Proposer | None = None, *, is_fixed: bool = False) -> LLM:
        longest = max(len(ids) for _, ids in self.prompts) + self.settings.num_tokens
        return LLM(
            model=self.model,
            tokenizer=self.tokenizer,
            settings=self.settings.engine,
            speculate=speculate,
            draft_length="fixed" if is_fixed else "measured",
            max_num_seqs=1,
            max_model_len=longest,
            num_blocks=2 * self.settings.num_blocks(self.model, longest),
        )


def benchmark(settings: DecodeSettings, model: str | None, drafting: DraftOptions) -> Benchmark:
    """Return the benchmark of the selected way of drafting; raises ValueError for options that conflict."""
    make_proposer = _proposer_factory(drafting, settings.engine.device, model)
    return Benchmark(
        run=lambda: run(settings, make_proposer, is_fixed=drafting.draft_fixed), render=render, is_good=is_good
    )


def _proposer_factory(drafting: DraftOptions, device: str | None, model: str | None) -> Callable[[], Proposer]:
    drafting.check_methods(pld=False)
    if drafting.draft_model is None and drafting.speculate in (None, "lookup"):
        return drafting.lookup
    if any(name.startswith("--pld-") for name in drafting.option_names()):
        method = "--speculate" if drafting.draft_model is None else "--draft-model"
        raise ValueError(f"give only one of {method} and the --pld options")

    def make_proposer() -> Proposer:
        proposer = drafting.proposer(device, model)
        assert proposer is not None
        return proposer

    return make_proposer


def run(
    settings: DecodeSettings, make_proposer: Callable[[], Proposer], *, is_fixed: bool, num_prompts: int = 2
) -> Document:
    """Generate from every prompt by plain decoding and with speculation, in turns.

    Returns {"header": ..., "speculation": ..., "classes": [...]}.
    """
    proposer = make_proposer()
    with Progress(1 + settings.repeats * num_prompts * len(PROMPTS)) as progress:
        with progress(f"weights of {settings.name}"):
            subject = Subject(settings, num_prompts)
            plain, drafting = subject.engine(), subject.engine(proposer, is_fixed=is_fixed)
        pairs: list[tuple[str, Run, Run]] = []
        for name, ids in subject.prompts:
            answer(plain, ids, 4), answer(drafting, ids, 4)  # warm up
            for _ in range(settings.repeats):
                with progress(f"{name}: plain and drafting"):
                    both = [answer(llm, ids, settings.num_tokens) for llm in (plain, drafting)]
                    pairs.append((name, both[0], both[1]))
    length = "always the longest" if is_fixed else f"by cost, acceptance {_estimate(drafting)}"
    return {
        "header": header(settings, subject.model),
        "speculation": {"proposer": type(proposer).__name__, "k": proposer.k, "draft_length": length},
        "num_runs": settings.repeats,
        "num_tokens": settings.num_tokens,
        "classes": [_summary(name, [pair[1:] for pair in pairs if pair[0] == name]) for name in PROMPTS],
    }


def _estimate(llm: LLM) -> str:
    return "not estimated" if llm.draft_length is None else f"estimated at {llm.draft_length.acceptance:.2f}"


def _summary(name: str, pairs: Sequence[tuple[Run, Run]]) -> Document:
    """Return the row of one class of prompts; pairs: the plain and the drafting run of each prompt and repeat."""
    runs = [run for _, run in pairs]
    classes = [classify(run.token_ids) for run in runs]
    ok = [pair for pair, label in zip(pairs, classes, strict=True) if label == OK]
    degraded = [pair for pair, label in zip(pairs, classes, strict=True) if label != OK]
    drafted: Counter[int] = sum((run.drafted for run in runs), Counter())
    accepted: Counter[int] = sum((run.accepted for run in runs), Counter())
    return {
        "class": name,
        "outputs": dict(Counter(classes)),
        "distinct": {n: statistics.mean(distinct(run.token_ids, n) for run in runs) for n in (1, 2, 3)},
        "equal": sum(plain.token_ids == run.token_ids for plain, run in pairs),
        "runs": len(pairs),
        "ok": _speeds(ok),
        "degraded": _speeds(degraded),
        "acceptance": accepted.total() / drafted.total() if drafted else None,
        "acceptance_by_position": [accepted[i] / drafted[i] for i in sorted(drafted)],
        "drafted_by_position": [drafted[i] for i in sorted(drafted)],
    }


def _speeds(pairs: Sequence[tuple[Run, Run]]) -> Document | None:
    """Return median speeds of plain decoding and of speculation over the same prompts; None without any."""
    if not pairs:
        return None
    plain, drafting = (statistics.median(pair[i].tok_s for pair in pairs) for i in range(2))
    return {"plain_tok_s": plain, "tok_s": drafting, "times": drafting / plain, "runs": len(pairs)}


def is_good(document: Document) -> bool:
    """Return whether speculation changed no output."""
    return all(row["equal"] == row["runs"] for row in document["classes"])


def _outputs(row: Document) -> str:
    """Return how many outputs are of each class, those that are OK first."""
    return " ".join(f"{name} {count}" for name, count in sorted(row["outputs"].items(), key=lambda pair: pair[0] != OK))


_COLUMNS: tuple[Column, ...] = (
    ("prompts", "{class}"),
    ("outputs", _outputs),
    *((heading, f"{{distinct[{n}]:.2f}}") for n, heading in ((1, "distinct-1"), (2, "-2"), (3, "-3"))),
    ("as plain", "{equal}/{runs}"),
    ("accepted", "{acceptance:.0%}"),
    ("OK: plain tok/s", "{ok[plain_tok_s]:.1f}"),
    ("drafting", "{ok[tok_s]:.1f}"),
    ("times", "{ok[times]:.2f}x"),
    ("other: plain", "{degraded[plain_tok_s]:.1f}"),
    ("drafting", "{degraded[tok_s]:.1f}"),
    ("times", "{degraded[times]:.2f}x"),
)


def render(document: Document) -> str:
    """Return the document as text."""
    spec = document["speculation"]
    lines = [
        *render_header(document["header"]),
        f"drafts    {spec['proposer']}, up to {spec['k']} tokens, {spec['draft_length']}",
        f"runs      medians of {document['num_runs']} for each prompt, up to {document['num_tokens']} tokens, greedy",
    ]
    lines += ["", *columns(document["classes"], _COLUMNS), "", "acceptance by position in the draft (number drafted)"]
    for row in document["classes"]:
        places = zip(row["acceptance_by_position"], row["drafted_by_position"], strict=True)
        lines.append(f"{row['class']:<12}" + ("  ".join(f"{p:.0%} ({n})" for p, n in places) or "nothing drafted"))
    if not is_good(document):
        lines += ["", "WRONG: speculation changed an output"]
    return "\n".join(lines)
