"""A trainer beside its rollout: what is compared, and the rules about both."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from whorl.doctor import arithmetic
from whorl.doctor.arithmetic import Fact
from whorl.doctor.launch import Launch
from whorl.doctor.promises import EQUALITY
from whorl.doctor.report import Finding, RotaryPath, Severity

# What is compared, in the order of the report.
ASPECTS: Final[dict[str, Callable[[Launch, RotaryPath], Fact]]] = {
    "rotary base": arithmetic.rotary_base,
    "rotary scaling": arithmetic.rotary_scaling,
    "rotary axes": arithmetic.rotary_sections,
    "rotary operator": arithmetic.rotary_operator,
    "cos and sin": arithmetic.cos_and_sin,
    "activations": arithmetic.activations,
    "router": arithmetic.router,
    "head": arithmetic.head,
    "weights": arithmetic.quantised,
    "KV cache": arithmetic.cache,
    "logprobs": arithmetic.logprobs,
    "tensor parallel": arithmetic.ranks,
    "prompts": arithmetic.prompts,
    "prefix cache": arithmetic.prefixes,
    "batch invariance": arithmetic.promise,
}
OFF: Final = (None, False, "disabled", "none")  # values of a switch


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A trainer and a rollout; `facts` has both sides' facts by aspect, `codes` those of findings on one side alone."""

    trainer: Launch
    rollout: Launch
    facts: Mapping[str, tuple[Fact, Fact]]
    codes: frozenset[str]

    @property
    def is_exact(self) -> bool:
        """Whether this pair is meant to give equal bits: both sides promise it, or one asks for the other's."""
        promised = [fact.value == "yes" for fact in self.facts["batch invariance"]]
        return all(promised) or self.first_on(*EQUALITY) is not None

    @property
    def mild(self) -> Severity:
        """The severity of what breaks equal bits and nothing else."""
        return "warning" if self.is_exact else "note"

    def differs(self, aspect: str) -> bool:
        trainer, rollout = self.facts[aspect]
        return bool(trainer.value and rollout.value) and trainer.value != rollout.value

    def sides(self, aspect: str) -> str:
        trainer, rollout = self.facts[aspect]
        return f"{trainer.value} in the trainer, {rollout.value} in the rollout"

    def difference(self, aspect: str, label: str = "", **text: Any) -> Iterator[Finding]:
        """Yield the finding of an aspect that differs; text: of the `Finding`, mild if it names no severity."""
        if self.differs(aspect):
            sides = f"{label or aspect}: {self.sides(aspect)}"
            yield Finding(**{"where": self.where(aspect), "found": sides, "severity": self.mild} | text)

    def where(self, aspect: str) -> str:
        """Return what gives both sides their values: settings, or defaults."""
        return " and ".join(dict.fromkeys(fact.because for fact in self.facts[aspect] if fact.value))

    @property
    def is_replayed(self) -> bool:
        """Whether the trainer takes the rollout's choices of experts."""
        settings = [*self.trainer.inputs.settings, *self.rollout.inputs.settings]
        last = {s.path: s.value for s in settings if arithmetic.REPLAY.search(s.path.replace("-", "_"))}
        return any(not isinstance(value, dict) and value not in OFF for value in last.values())

    def first_on(self, *keys: str) -> str | None:
        """Return the place of the first of these switches that either side has on, or None."""
        for launch in (self.trainer, self.rollout):
            for key in keys:
                if launch.get(key) not in OFF:
                    return launch.where(key)
        return None

    @property
    def correction(self) -> str | None:
        """The place of the setting that corrects the loss for other probabilities of the rollout, or None."""
        own = "vllm_importance_sampling_correction"
        if self.trainer.scope.startswith("trl") and self.trainer.get(own) is None:
            return f"{own}, TRL's default"
        if self.trainer.scope.startswith("prime-rl"):
            return "prime-rl's loss"
        return self.first_on(*arithmetic.CORRECTIONS)


PairCheck = Callable[[Pair], Iterator[Finding]]
PAIR_RULES: Final[list[tuple[str, PairCheck]]] = []


def pair_rule(code: str) -> Callable[[PairCheck], PairCheck]:
    """Return a decorator that adds a check of both sides to PAIR_RULES under `code`."""

    def add(function: PairCheck) -> PairCheck:
        PAIR_RULES.append((code, function))
        return function

    return add
