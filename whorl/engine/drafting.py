"""The command-line options of speculative decoding, and the proposer that they select. torch is imported lazily."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from whorl.fields import option

if TYPE_CHECKING:
    from .speculate import Proposer

LOOKUP, DRAFT = "Prompt lookup decoding", "Drafting"
# Proposers by value of --speculate: a module of `speculate` and its class. Adding one takes a file and a line here.
METHODS = {
    "lookup": "prompt_lookup:PromptLookup",
    "mtp": "mtp:MTP",
}
_LOOKUP_OPTIONS = ("pld_k", "pld_ngram", "pld_min_hist", "pld_guard_distinct", "pld_guard_tail", "pld_loop_warn")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """Options of speculative decoding. None means that the option is absent: then the proposer's default applies, which
    the help text has in parentheses."""

    pld: bool = option(False, "Draft by n-gram matches in prompt and output. The text stays the same.", panel=LOOKUP)
    pld_k: int | None = option(None, "Longest draft (10).", panel=LOOKUP, least=1)
    pld_ngram: int | None = option(None, "Shortest match that may draft (1).", panel=LOOKUP, least=1)
    pld_min_hist: int | None = option(None, "Tokens before the first draft (20).", panel=LOOKUP, least=0)
    pld_no_guard: bool = option(False, "Draft repetitions of one token as well.", panel=LOOKUP)
    pld_guard_distinct: int | None = option(None, "Fewest distinct tokens of a draft (3).", panel=LOOKUP, least=0)
    pld_guard_tail: int | None = option(
        None, "Equal last tokens after which that token is not drafted (6).", panel=LOOKUP, least=1
    )
    pld_loop_warn: int | None = option(None, "Equal tokens in a row that cause a warning (8).", panel=LOOKUP, least=1)
    speculate: str | None = option(
        None,
        "lookup: the same as --pld. mtp: draft with the model's layer of multi-token prediction.",
        panel=DRAFT,
        metavar="METHOD",
    )
    draft_model: str | None = option(
        None, "A smaller model with the same tokenizer that drafts for this one.", panel=DRAFT, metavar="MODEL"
    )
    draft_k: int | None = option(
        None, "Longest draft of --draft-model (4), or of --speculate mtp (1).", panel=DRAFT, least=1
    )
    draft_fixed: bool = option(
        False, "Always draft the full length. Default: as many tokens as pay off, by measurement.", panel=DRAFT
    )

    def option_names(self) -> list[str]:
        """Return the options about drafting that are set, as a command line spells them."""
        optional = (*_LOOKUP_OPTIONS, "speculate", "draft_model", "draft_k")
        names = [name for name in optional if getattr(self, name) is not None]
        names += [name for name in ("pld_no_guard", "draft_fixed") if getattr(self, name)]
        return [f"--{name.replace('_', '-')}" for name in names]

    def check(self) -> None:
        """Raise ValueError if options contradict each other."""
        self.check_methods(self.pld)
        if (lookup := [name for name in self.option_names() if name.startswith("--pld-")]) and not self.looks_up:
            raise ValueError(f"{lookup[0]} needs --pld")
        if self.pld_no_guard and (self.pld_guard_distinct is not None or self.pld_guard_tail is not None):
            raise ValueError("--pld-no-guard switches off what --pld-guard-distinct and --pld-guard-tail set")
        if self.draft_fixed and self.draft_model is None and self.speculate is None and not self.pld:
            raise ValueError("--draft-fixed needs --pld or --draft-model, or --speculate")

    def check_methods(self, pld: bool) -> None:
        """Raise ValueError for two proposers, an unknown one, or a length without one. pld: whether --pld is set."""
        if self.speculate is not None and self.speculate not in METHODS:
            raise ValueError(f"--speculate {self.speculate}: expected one of {', '.join(METHODS)}")
        values = {"--draft-model": self.draft_model, "--speculate": self.speculate, "--pld": pld or None}
        proposers = [name for name, value in values.items() if value is not None]
        if len(proposers) > 1:
            raise ValueError(f"give only one of {proposers[0]} and {proposers[1]}")
        if self.draft_k is not None and self.draft_model is None and self.speculate in (None, "lookup"):
            raise ValueError("--draft-k needs --draft-model or --speculate mtp")

    @property
    def looks_up(self) -> bool:
        return self.pld or self.speculate == "lookup"

    @property
    def draft_length(self) -> Literal["fixed", "measured"]:
        return "fixed" if self.draft_fixed else "measured"

    def proposer(self, device: str | None = None, path: str | None = None) -> "Proposer | None":
        """Return the selected proposer, or None. device: of a draft model. path: the target's checkpoint, for an engine
        that gets the model itself and not its path."""
        if self.draft_model is not None:
            from .speculate.draft_model import DraftModel

            return DraftModel(self.draft_model, k=self.draft_k or 4, device=device)
        if self.looks_up or self.speculate is None:
            return self.lookup() if self.looks_up else None
        module, _, name = METHODS[self.speculate].partition(":")
        kind = getattr(import_module(f".speculate.{module}", __package__), name)
        return kind(path, **({} if self.draft_k is None else {"k": self.draft_k}))  # type: ignore[no-any-return]

    def lookup(self, **changes: int) -> "Proposer":
        """Return prompt lookup with these options. changes: arguments of `PromptLookup` that override them."""
        from .speculate.prompt_lookup import PromptLookup

        values = {name.removeprefix("pld_"): getattr(self, name) for name in _LOOKUP_OPTIONS}
        options = {name: value for name, value in values.items() if value is not None}
        return PromptLookup(**{"guard": not self.pld_no_guard, **options, **changes})
