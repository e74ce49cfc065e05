"""`check_pair` compares a trainer with its rollout: what both compute, where it differs, and by which mechanism."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from whorl.doctor import arithmetic
from whorl.doctor.arithmetic import Fact
from whorl.doctor.build_launch import build_launch
from whorl.doctor.checkup import check_part, describe_model
from whorl.doctor.inputs import Inputs, read_inputs
from whorl.doctor.jobs import JOBS, SAMPLING, parts
from whorl.doctor.launch import ENGINES, Launch
from whorl.doctor.promises import EQUALITY
from whorl.doctor.report import Aspect, Finding, Report, RotaryPath, Severity, by_severity
from whorl.doctor.settings import BadInput

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
# Two texts that differ here do not say that results do.
UNORDERED: Final = ("rotary operator", "logprobs", "prompts", "prefix cache")


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


def check_pair(
    trainer: str | Path,
    rollout: str | Path | None = None,
    *,
    model: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Report:
    """Compare a trainer with its rollout and return the Report, whose `sides` say what both compute.

    trainer and rollout: files or folders of configuration, as for `check`; rollout None: the trainer's files are a job
    that starts both; model: the folder or config.json of the model of both, where their own folders have none;
    settings and device: as for `check`, for both sides. Raises BadInput when an input cannot be read, or when there is
    no rollout.
    """
    import whorl.doctor.checks.sides  # noqa: F401  (fills PAIR_RULES)

    shared = read_inputs(model) if model is not None else Inputs()
    inputs = [read_inputs(path, settings) for path in dict.fromkeys((trainer, rollout or trainer))]
    known = next((side for side in (*inputs, shared) if side.model is not None), shared)
    for side in inputs:
        if side.model is None:
            side.model, side.model_where = known.model, known.model_where
    launches = [build_launch(side, framework=None, train=False, device=device) for side in inputs]
    pair, paths, findings = _compare(_sides(launches, trainer))
    for code, function in PAIR_RULES:
        findings += [replace(finding, code=code) for finding in function(pair)]
    return Report(
        framework=f"{pair.trainer.framework} trains, {pair.rollout.framework} generates",
        framework_because="; ".join(launch.framework_because for launch in launches),
        device=pair.rollout.device,
        device_because=pair.rollout.device_because,
        train=True,
        model=describe_model(pair.trainer),
        read=tuple(name for side in inputs for name in side.read),
        paths=paths,
        findings=by_severity(findings),
        sides=tuple(_aspects(pair)),
    )


def _sides(launches: list[Launch], trainer: str | Path) -> tuple[Launch, Launch]:
    """Return the trainer and the rollout of one launch, which is a job, or of two."""
    first, last = launches[0], launches[-1]
    because = f"it is of {first.framework}, {first.framework_because}"
    if first.framework in ENGINES:
        raise BadInput(f"{trainer}: trains nothing ({because}). Give the trainer, or a job of {', '.join(JOBS)}")
    if len(launches) == 1 and first.framework not in JOBS:
        raise BadInput(f"{trainer}: starts no rollout ({because}). Give --rollout FILE, or a job of {', '.join(JOBS)}")
    trains, generates = parts(first)[0], parts(last)[-1]
    if len(launches) == 2 and first.framework in JOBS:
        # A trainer sends the settings of sampling with its requests.
        sent = [setting for setting in parts(first)[-1].inputs.settings if setting.key in SAMPLING]
        generates = replace(generates, inputs=replace(generates.inputs, settings=[*sent, *generates.inputs.settings]))
    if generates.framework not in ENGINES and last.framework not in JOBS:
        raise BadInput(
            f"--rollout: is of {last.framework} ({last.framework_because}), which serves no model. Give a launch of "
            f"{', '.join(ENGINES)}, or a job"
        )
    return replace(trains, train=True), replace(generates, train=False)


def _compare(sides: tuple[Launch, Launch]) -> tuple[Pair, tuple[RotaryPath, ...], list[Finding]]:
    """Return the pair, its rotary paths, and what is wrong with each side alone."""
    paths, findings = [], []
    for side in sides:
        path, alone = check_part(side)
        paths.append(path)
        findings += [finding for finding in alone if finding not in findings]
    facts = {name: (fact(sides[0], paths[0]), fact(sides[1], paths[1])) for name, fact in ASPECTS.items()}
    codes = frozenset(finding.code for finding in findings)
    return Pair(trainer=sides[0], rollout=sides[1], facts=facts, codes=codes), tuple(paths), findings


def _aspects(pair: Pair) -> Iterator[Aspect]:
    for name, (trainer, rollout) in pair.facts.items():
        if trainer.value or rollout.value:
            is_known = bool(trainer.value and rollout.value) and name not in UNORDERED
            yield Aspect(
                name=name,
                trainer=str(trainer),
                rollout=str(rollout),
                agrees=trainer.value == rollout.value if is_known or trainer.value == rollout.value else None,
            )
