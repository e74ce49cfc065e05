"""`check_pair` compares a trainer with its rollout: what both compute, where it differs, and by which mechanism."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import whorl.doctor.checks.sides  # noqa: F401  (fills PAIR_RULES)
from whorl.doctor.build_launch import build_launch
from whorl.doctor.checkup import check_part, describe_model
from whorl.doctor.inputs import Inputs, read_inputs
from whorl.doctor.jobs import JOBS, SAMPLING, parts
from whorl.doctor.launch import ENGINES, Launch
from whorl.doctor.pair import ASPECTS, PAIR_RULES, Pair
from whorl.doctor.report import Aspect, Finding, Report, RotaryPath, by_severity
from whorl.doctor.settings import BadInput

# Two texts that differ here do not say that results do.
UNORDERED: Final = ("rotary operator", "logprobs", "prompts", "prefix cache")


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
