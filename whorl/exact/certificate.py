"""A certificate that a rollout, its recomputation and the first training forward have the same log-probabilities.

They are compared as bit patterns of fp32. What could hide a difference is an error: no token, other tokens, a value
that is not finite, other weights, or logits that were masked or scaled differently.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SHOWN = 3  # mismatches that a report names


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """What became of the logits before the log-softmax. grammar: the name of what masked tokens; "": nothing did.

    changes: other changes, such as penalties, by their name and value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    grammar: str = ""
    changes: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, params: Any, logprobs_mode: str) -> "Distribution":
        """Return that of log-probabilities from whorl's engine. params: `SamplingParams` of the requests.

        logprobs_mode: the engine's setting: raw log-probabilities are those of the logits as they are.
        """
        if logprobs_mode == "raw_logprobs":
            return cls()
        if logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"certify: logprobs_mode is {logprobs_mode!r}, expected raw_logprobs or processed_logprobs"
            )
        names = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_n_sigma": 0.0,
            "min_tokens": 0,
        }
        changes = [(name, value) for name, neutral in names.items() if (value := getattr(params, name)) != neutral]
        changes += sorted((f"logit_bias of {token}", bias) for token, bias in params.logit_bias.items())
        return cls(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            grammar="" if params.allow is None else "allow",
            changes=tuple(changes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The log-probabilities of one side.

    token_ids: the answers. logprobs: one number for each of their tokens, as tensors or lists of fp32 values. versions:
    every version of the weights that took part: of all answers, or before and after the forward.
    """

    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Tensor | Sequence[float]]
    versions: tuple[str, ...]
    distribution: Distribution = Distribution()

    @classmethod
    def of(cls, outputs: Sequence[Any], distribution: Distribution | None = None) -> "Scores":
        """Return those of outputs of whorl's engine (`LLM.generate`, with logprobs=0)."""
        return cls(
            token_ids=[output.token_ids for output in outputs],
            logprobs=[[each.logprob for each in output.logprobs] for output in outputs],
            versions=tuple(sorted({version for output in outputs for version, _ in output.weight_versions})),
            distribution=distribution or Distribution(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What `certify` has compared; print it for a report. mismatches: of both comparisons with the rollout."""

    num_sequences: int
    num_tokens: int
    version: str
    distribution: Distribution
    mismatches: tuple[str, ...]

    def __str__(self) -> str:
        is_exact = "EXACT" if not self.mismatches else "NOT EXACT"
        lines = [
            f"whorl.exact: {is_exact}: {len(self.mismatches)} mismatches of {2 * self.num_tokens} comparisons",
            f"  tokens        {self.num_tokens} in {self.num_sequences} answers, none skipped, all finite",
            "  compared      rollout = recomputed, rollout = first training forward, as fp32 bit patterns",
            f"  weights       {self.version}, on all sides, from start to end",
            f"  distribution  {self.distribution}",
            f"  torch         {torch.__version__}",
        ]
        more = len(self.mismatches) - _SHOWN
        return "\n".join([*lines, *self.mismatches[:_SHOWN], *([f"  and {more} more"] if more > 0 else [])])


class NotExactError(AssertionError):
    """Raised by `certify` where log-probabilities differ; `certificate` says where."""

    def __init__(self, certificate: Certificate) -> None:
        super().__init__(str(certificate))
        self.certificate = certificate


def certify(rollout: Scores, trainer: Scores, *, recomputed: Scores) -> Certificate:
    """Return a certificate that three sides have the same log-probabilities, bit for bit.

    rollout: what was sampled. trainer: the first forward of training with these tokens. recomputed: the same tokens
    scored again before training, by the trainer or sent back to the engine.
    Raises NotExactError where a bit differs, with the number of mismatches; ValueError where the comparison would prove
    nothing: no token, other tokens or another number of them, a value that is not finite or not fp32, more than one
    version of the weights, or other distributions.

        print(certify(rollout, trainer, recomputed=again))
    """
    sides = {"rollout": rollout, "recomputed": recomputed, "trainer": trainer}
    values = {name: _values(name, side) for name, side in sides.items()}
    for name, side in sides.items():
        _check_same(name, side, rollout)
    versions = {version for side in sides.values() for version in side.versions}
    if len(versions) != 1 or any(not side.versions for side in sides.values()):
        named = {name: list(side.versions) for name, side in sides.items()}
        raise ValueError(f"certify: the versions of the weights are {named}, expected one and the same on all sides")
    certificate = Certificate(
        num_sequences=len(rollout.token_ids),
        num_tokens=sum(map(len, rollout.token_ids)),
        version=versions.pop(),
        distribution=rollout.distribution,
        mismatches=tuple(each for name in ("recomputed", "trainer") for each in _mismatches(name, values)),
    )
    if certificate.mismatches:
        raise NotExactError(certificate)
    return certificate


def _values(name: str, side: Scores) -> list[Tensor]:
    """Return a side's log-probabilities as fp32 on the host; one tensor an answer."""
    if not any(len(ids) for ids in side.token_ids):
        raise ValueError(f"certify: {name} has no token: nothing would be compared")
    if len(side.logprobs) != len(side.token_ids):
        raise ValueError(f"certify: {name} has {len(side.token_ids)} answers and logprobs of {len(side.logprobs)}")
    values = []
    for i, (ids, logprobs) in enumerate(zip(side.token_ids, side.logprobs, strict=True)):
        # Numbers of Python have 64 bits; rounding them here would hide a difference.
        wide = logprobs.detach().cpu() if isinstance(logprobs, Tensor) else torch.tensor(logprobs, dtype=torch.float64)
        narrow = wide.to(torch.float32)
        where = f"certify: {name}: answer {i}"
        if wide.shape != (len(ids),):
            raise ValueError(f"{where} has {len(ids)} tokens and logprobs {list(wide.shape)}: none may be skipped")
        if not bool(wide.isfinite().all()):
            place = int((~wide.isfinite()).nonzero()[0])
            raise ValueError(f"{where}: the logprob of token {place} is {float(wide[place])}, expected a finite number")
        if wide.dtype not in (torch.float32, torch.float64) or not torch.equal(narrow.double(), wide.double()):
            raise ValueError(f"{where}: logprobs are {wide.dtype}, expected fp32 values, not rounded before or after")
        values.append(narrow)
    return values


def _check_same(name: str, side: Scores, rollout: Scores) -> None:
    counts = [sum(map(len, each.token_ids)) for each in (side, rollout)]
    if counts[0] != counts[1]:
        raise ValueError(f"certify: {name} has {counts[0]} tokens, expected those of the rollout, {counts[1]}")
    if [list(ids) for ids in side.token_ids] != [list(ids) for ids in rollout.token_ids]:
        raise ValueError(f"certify: {name} has other tokens than the rollout")
    if side.distribution != rollout.distribution:
        raise ValueError(
            f"certify: {name} has log-probabilities of another distribution than the rollout: {side.distribution}, "
            f"expected {rollout.distribution}"
        )


def _mismatches(name: str, values: dict[str, list[Tensor]]) -> Iterable[str]:
    for i, (expected, actual) in enumerate(zip(values["rollout"], values[name], strict=True)):
        for place in (expected.view(torch.int32) != actual.view(torch.int32)).nonzero().flatten().tolist():
            numbers = " and ".join(f"{float(x[place])!r} ({_bits(x[place])})" for x in (expected, actual))
            yield f"  answer {i}, token {place}: rollout and {name} have {numbers}"


def _bits(x: Tensor) -> str:
    return f"{int(x.view(torch.int32)) & 0xFFFFFFFF:08x}"
