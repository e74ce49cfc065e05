"""What commands take about speculation, and the proposer that it comes to. No torch here until one is made."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from whorl.fields import option

if TYPE_CHECKING:
    from .speculate import Proposer

LOOKUP, DRAFT = "Prompt lookup decoding", "Drafting"
_OF_LOOKUP = ("pld_k", "pld_ngram", "pld_min_hist", "pld_guard_distinct", "pld_guard_tail", "pld_loop_warn")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """None is "not given": then the proposer's own default holds, which the text has in parentheses."""

    pld: bool = option(False, "Draft from what was said: the same text, sooner.", panel=LOOKUP)
    pld_k: int | None = option(None, "Longest draft (10).", panel=LOOKUP, least=1)
    pld_ngram: int | None = option(None, "Shortest match that may draft (1).", panel=LOOKUP, least=1)
    pld_min_hist: int | None = option(None, "Tokens before the first draft (20).", panel=LOOKUP, least=0)
    pld_no_guard: bool = option(False, "Draft repetitions too.", panel=LOOKUP)
    pld_guard_distinct: int | None = option(None, "Fewest different tokens of a draft (3).", panel=LOOKUP, least=0)
    pld_guard_tail: int | None = option(
        None, "Equal tokens after which their like is not drafted (6).", panel=LOOKUP, least=1
    )
    pld_loop_warn: int | None = option(None, "Equal tokens in a row to warn of (8).", panel=LOOKUP, least=1)
    draft_model: str | None = option(
        None, "A smaller model of the same tokenizer that drafts for this one.", panel=DRAFT, metavar="MODEL"
    )
    draft_k: int | None = option(None, "Longest draft of --draft-model (4).", panel=DRAFT, least=1)
    draft_fixed: bool = option(
        False, "Always draft the longest. Default: as much as pays, by measurement.", panel=DRAFT
    )

    def given(self) -> list[str]:
        """The options that say how to draft, as a command line spells them."""
        names = [name for name in (*_OF_LOOKUP, "draft_model", "draft_k") if getattr(self, name) is not None]
        names += [name for name in ("pld_no_guard", "draft_fixed") if getattr(self, name)]
        return [f"--{name.replace('_', '-')}" for name in names]

    def check(self) -> None:
        """Refuse with ValueError what does not go together."""
        if (lookup := [name for name in self.given() if name.startswith("--pld-")]) and not self.pld:
            raise ValueError(f"{lookup[0]} needs --pld")
        if self.pld_no_guard and (self.pld_guard_distinct is not None or self.pld_guard_tail is not None):
            raise ValueError("--pld-no-guard switches off what --pld-guard-distinct and --pld-guard-tail set")
        if self.draft_model is not None and self.pld:
            raise ValueError("--draft-model and --pld: say one of them")
        if self.draft_model is None and self.draft_k is not None:
            raise ValueError("--draft-k needs --draft-model")
        if self.draft_fixed and self.draft_model is None and not self.pld:
            raise ValueError("--draft-fixed needs --pld or --draft-model")

    @property
    def draft_length(self) -> Literal["fixed", "measured"]:
        return "fixed" if self.draft_fixed else "measured"

    def proposer(self, device: str | None = None) -> "Proposer | None":
        """device: of a draft model."""
        if self.draft_model is not None:
            from .speculate.draft_model import DraftModel

            return DraftModel(self.draft_model, k=self.draft_k or 4, device=device)
        return self.lookup() if self.pld else None

    def lookup(self, **changes: int) -> "Proposer":
        """Prompt lookup with these options. changes: other values of its own."""
        from .speculate.prompt_lookup import PromptLookup

        named = {name.removeprefix("pld_"): getattr(self, name) for name in _OF_LOOKUP}
        given = {name: value for name, value in named.items() if value is not None}
        return PromptLookup(**{"guard": not self.pld_no_guard, **given, **changes})
