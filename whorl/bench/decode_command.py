"""What `whorl bench decode` makes of its options: which of the measurements, and of what."""

from collections.abc import Callable

from whorl.bench import (
    classify,
    decode,
    decode_peer,
    decode_profile,
    decode_report,
    draft_lengths,
    draft_sweep,
    first_steps,
)
from whorl.bench.decode import DecodeSettings
from whorl.bench.decode_options import DecodeOptions
from whorl.bench.provenance import Document
from whorl.device import accelerator, default_device
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate import Proposer

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right


def prepare(model: str | None, asked: DecodeOptions, engine: EngineSettings, drafting: DraftOptions) -> Work:
    """Refuse with ValueError what does not go together; the rest is the work."""
    mode = asked.mode
    settings = _settings(model, asked, engine, drafting)
    if mode == "classify":
        make = _proposer(drafting, engine.device, model)

        def compare() -> tuple[Document, str, bool]:
            document = classify.run(settings, make, is_fixed=drafting.draft_fixed)
            return document, classify.render(document), classify.is_good(document)

        return compare
    if mode == "sweep":
        lengths = draft_sweep.parse_sweep(str(asked.sweep))

        def try_all() -> tuple[Document, str, bool]:
            document = draft_sweep.sweep(settings, lengths, drafting)
            return document, draft_sweep.render_sweep(document), all(row["equal"] for row in document["rows"])

        return try_all
    if mode == "draft_lengths":
        counts = decode.parse_counts(str(asked.draft_lengths), "--draft-lengths")
        draft_lengths.check(settings, counts)

        def time_drafts() -> tuple[Document, str, bool]:
            document = draft_lengths.run(settings, counts)
            return document, draft_lengths.render(document), True

        return time_drafts
    if mode == "verify":

        def time_steps() -> tuple[Document, str, bool]:
            document = draft_sweep.verify(settings)
            return document, draft_sweep.render_verify(document), True

        return time_steps

    if mode == "profile":

        def take_apart() -> tuple[Document, str, bool]:
            document = decode_profile.run(settings)
            return document, decode_profile.render(document), True

        return take_apart
    if mode == "first":

        def start() -> tuple[Document, str, bool]:
            document = first_steps.run(settings)
            return document, first_steps.render(document), first_steps.is_good(document)

        return start

    def time_all() -> tuple[Document, str, bool]:
        document = decode.run(settings, decode_peer.run if settings.peer else None)
        return document, decode_report.render(document), True

    return time_all


def _settings(
    model: str | None, asked: DecodeOptions, engine: EngineSettings, drafting: DraftOptions
) -> DecodeSettings:
    mode = asked.mode
    if (given := drafting.given()) and mode not in ("classify", "sweep"):
        raise ValueError(f"{given[0]} is about drafting: add --classify or --sweep")
    if asked.random_config is not None and mode in ("classify", "sweep"):
        raise ValueError(f"--{mode} needs a MODEL that speaks: random weights say nothing")
    if engine.warmup is not None and mode != "first":
        raise ValueError(f"--warmup {engine.warmup} is about a start: add --first; what is timed has run before")
    if asked.context is not None and mode in ("classify", "sweep", "verify"):
        raise ValueError(f"--context {asked.context} is about plain decoding, and not --{mode}: leave one of them out")
    device = engine.device or default_device()
    if mode == "profile":
        decode_profile.need_profiler(device)
    return DecodeSettings.resolve(
        model=model,
        random_config=asked.random_config,
        engine=engine.changed(device=device),
        batch=asked.batch or {"verify": "1..8", "draft_lengths": "1"}.get(mode or "", "1,8,64"),
        context=asked.context,
        num_tokens=asked.tokens or (64 if accelerator(device) is None else 128),
        prompt_tokens=asked.prompt_tokens,
        repeats=asked.repeats,
        peer=asked.peer,
    )


def _proposer(drafting: DraftOptions, device: str | None, model: str | None) -> Callable[[], Proposer]:
    drafting.check_methods(pld=False)
    if drafting.draft_model is None and drafting.speculate in (None, "lookup"):
        return drafting.lookup
    if any(name.startswith("--pld-") for name in drafting.given()):
        who = "--speculate" if drafting.draft_model is None else "--draft-model"
        raise ValueError(f"{who} and --pld options: say one of them")

    def make() -> Proposer:
        found = drafting.proposer(device, model)
        assert found is not None
        return found

    return make
