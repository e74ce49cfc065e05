"""What `whorl bench decode` makes of its options: which of four measurements, and of what."""

from collections.abc import Callable
from typing import Any

from whorl.bench import classify, decode, decode_peer, decode_report, draft_sweep
from whorl.bench.decode import Settings
from whorl.bench.provenance import Document
from whorl.device import accelerator, default_device
from whorl.engine.speculate import Proposer
from whorl.engine.speculate.prompt_lookup import PromptLookup

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right
_LOOKUP = ("pld_k", "pld_ngram", "pld_min_hist")


def prepare(**given: Any) -> Work:
    """Refuse with ValueError what does not go together; the rest is the work."""
    modes = [mode for mode in ("classify", "sweep", "verify") if given[mode]]
    if len(modes) > 1:
        raise ValueError(f"bench decode: --{modes[0]} and --{modes[1]}: say one of them")
    settings = _settings(given, modes)
    lookup = {name.removeprefix("pld_"): given[name] for name in _LOOKUP if given[name] is not None}
    lookup["guard"] = not given["pld_no_guard"]
    if modes == ["classify"]:
        make = _proposer(given, lookup)

        def compare() -> tuple[Document, str, bool]:
            document = classify.run(settings, make, is_fixed=given["draft_fixed"])
            return document, classify.render(document), classify.is_good(document)

        return compare
    if modes == ["sweep"]:
        asked = draft_sweep.parse_sweep(given["sweep"])

        def try_all() -> tuple[Document, str, bool]:
            document = draft_sweep.sweep(settings, asked, lookup)
            return document, draft_sweep.render_sweep(document), all(row["equal"] for row in document["rows"])

        return try_all
    if modes == ["verify"]:

        def time_steps() -> tuple[Document, str, bool]:
            document = draft_sweep.verify(settings)
            return document, draft_sweep.render_verify(document), True

        return time_steps

    def time_all() -> tuple[Document, str, bool]:
        document = decode.run(settings, decode_peer.run if settings.peer else None)
        return document, decode_report.render(document), True

    return time_all


def _settings(given: dict[str, Any], modes: list[str]) -> Settings:
    drafting = [name for name in (*_LOOKUP, "draft_model", "draft_k") if given[name] is not None]
    drafting += [name for name in ("pld_no_guard", "draft_fixed") if given[name]]
    if drafting and modes not in (["classify"], ["sweep"]):
        raise ValueError(f"--{drafting[0].replace('_', '-')} is about drafting: add --classify or --sweep")
    if given["random_config"] is not None and modes in (["classify"], ["sweep"]):
        raise ValueError(f"--{modes[0]} needs a MODEL that speaks: random weights say nothing")
    device = str(given["device"] or default_device())
    return Settings.resolve(
        model=given["model"],
        random_config=given["random_config"],
        device=device,
        dtype=str(given["dtype"]) if given["dtype"] else None,
        batch=given["batch"] or ("1..8" if modes == ["verify"] else "1,8,64"),
        num_tokens=given["tokens"] or (64 if accelerator(device) is None else 128),
        prompt_tokens=given["prompt_tokens"],
        repeats=given["repeats"],
        peer=given["peer"],
    )


def _proposer(given: dict[str, Any], lookup: dict[str, Any]) -> Callable[[], Proposer]:
    if given["draft_model"] is None:
        if given["draft_k"] is not None:
            raise ValueError("--draft-k needs --draft-model")
        return lambda: PromptLookup(**lookup)
    if any(given[name] is not None for name in _LOOKUP) or given["pld_no_guard"]:
        raise ValueError("--draft-model and --pld options: say one of them")
    from whorl.engine.speculate.draft_model import DraftModel

    return lambda: DraftModel(given["draft_model"], k=given["draft_k"] or 4, device=given["device"])
