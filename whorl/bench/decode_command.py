"""Turns the options of `whorl bench decode` into one of its benchmarks."""

from collections.abc import Callable

from whorl.bench import (
    classify,
    decode,
    decode_peer,
    decode_profile,
    decode_profile_report,
    decode_report,
    draft_lengths,
    draft_sweep,
    first_steps,
)
from whorl.bench.decode import DecodeSettings
from whorl.bench.decode_options import DecodeOptions, parse_counts
from whorl.bench.provenance import Document
from whorl.device import accelerator, default_device
from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate import Proposer

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right


def build_benchmark(model: str | None, options: DecodeOptions, engine: EngineSettings, drafting: DraftOptions) -> Work:
    """Return the benchmark that the options select, ready to run; raises ValueError for options that conflict."""
    mode = options.mode
    settings = _settings(model, options, engine)
    if mode == "classify":
        make_proposer = _proposer_factory(drafting, engine.device, model)

        def classify_outputs() -> tuple[Document, str, bool]:
            document = classify.run(settings, make_proposer, is_fixed=drafting.draft_fixed)
            return document, classify.render(document), classify.is_good(document)

        return classify_outputs
    if mode == "sweep":
        lengths = draft_sweep.parse_sweep(str(options.sweep))

        def sweep_lengths() -> tuple[Document, str, bool]:
            document = draft_sweep.sweep(settings, lengths, drafting)
            return document, draft_sweep.render_sweep(document), all(row["equal"] for row in document["rows"])

        return sweep_lengths
    if mode == "draft_lengths":
        counts = parse_counts(str(options.draft_lengths), "--draft-lengths")
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

        def profile_steps() -> tuple[Document, str, bool]:
            document = decode_profile.run(settings)
            return document, decode_profile_report.render(document), True

        return profile_steps
    if mode == "first":

        def time_start() -> tuple[Document, str, bool]:
            document = first_steps.run(settings)
            return document, first_steps.render(document), first_steps.is_good(document)

        return time_start

    def time_all() -> tuple[Document, str, bool]:
        document = decode.run(settings, decode_peer.run if settings.peer else None)
        return document, decode_report.render(document), True

    return time_all


def _settings(model: str | None, options: DecodeOptions, engine: EngineSettings) -> DecodeSettings:
    mode = options.mode
    device = engine.device or default_device()
    if mode == "profile":
        decode_profile.need_profiler(device)
    return DecodeSettings.resolve(
        model=model,
        random_config=options.random_config,
        engine=engine.changed(device=device),
        batch=options.batch or {"verify": "1..8", "draft_lengths": "1"}.get(mode or "", "1,8,64"),
        context=options.context,
        num_tokens=options.tokens or (64 if accelerator(device) is None else 128),
        prompt_tokens=options.prompt_tokens,
        repeats=options.repeats,
        peer=options.peer,
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
