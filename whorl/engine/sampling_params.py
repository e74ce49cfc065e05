"""Sampling parameters. Each is declared here, once: the engine's arrays, the APIs, the flags and `/set` follow.

A parameter that filters tokens on the device has an `array` and is also an argument, of its name, of `ops.sample`.
"""

import math
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

from whorl.fields import Option, option, options, out_of_bounds

if TYPE_CHECKING:
    from torch import Tensor


ON_UPDATE = Literal["continue", "restart", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter(Option):
    """A sampling parameter that is a number.

    array: the type of its array in a call, "f4" or "i4", if `ops.sample` takes it. is_advised: a model's
    generation_config.json may have it. is_in_apis: every API has a field of its name. api_least, api_most: bounds of
    that field, where they differ from its own.
    """

    array: str | None = None
    is_advised: bool = False
    is_in_apis: bool = True
    api_least: float | None = None
    api_most: float | None = None

    @property
    def api_bounds(self) -> tuple[float | None, float | None]:
        """The bounds, both inclusive, of the field of an API."""
        return (
            self.least if self.api_least is None else self.api_least,
            self.most if self.api_most is None else self.api_most,
        )


def parameter(default: float | None, text: str, *names: str, **more: Any) -> Any:
    """Return a field of `SamplingParams`: its default, its help text, its flags and other fields of `Parameter`."""
    return option(default, text, *names, declared=Parameter, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request is sampled and when it ends. temperature 0 is greedy.

    n: sequences for the prompt. seed: the random numbers depend only on the seed and the token's place, so a request
    gives the same text in any batch; None draws a new seed for each request. logprobs: how many alternatives to report
    with each token (0: only the token itself). allow: a function of the output so far that returns a bool mask [V] of
    the tokens that may follow, or None for all; if it keeps state it has a method `fork`, called once for each
    sequence. cache_salt: prefixes are shared only among requests of the same salt, so that neither latency nor
    counters reveal other requests. lora: the name of an adapter (`LLM.load_lora`); None: the model alone. on_update:
    when the weights change before its end, it goes on with the new ones, is computed again from the prompt on, or ends
    with the reason "abort". embed: keep the last hidden state of the prompt's last token. client: whose request it is;
    clients take turns, see `fair_queue`. priority: lower numbers run earlier; those of one client are compared, between
    clients a number below 0 counts as 0.
    Raises ValueError when a value is out of range. Example: `SamplingParams(temperature=0, max_tokens=64)`
    """

    max_tokens: int | None = parameter(
        None,
        "Longest answer, in tokens.",
        least=1,
        most=2**31 - 1,
        is_in_apis=False,
    )
    min_tokens: int = parameter(
        0, "Shortest answer, in tokens; before that no stop ends it.", least=0, is_in_apis=False
    )
    temperature: float = parameter(
        1.0, "How random the choice is; 0: greedy.", least=0, api_most=100, array="f4", is_advised=True
    )
    top_k: int = parameter(
        0,
        "Sample from the N most likely tokens; 0: all.",
        least=0,
        most=2**31 - 1,
        api_least=-1,
        array="i4",
        is_advised=True,
    )
    top_p: float = parameter(
        1.0,
        "Sample from the most likely tokens whose probabilities sum to N; 1: all.",
        above=0,
        most=1,
        array="f4",
        is_advised=True,
    )
    min_p: float = parameter(
        0.0,
        "Leave out tokens less than N times as likely as the most likely one; 0: none.",
        least=0,
        most=1,
        array="f4",
        is_advised=True,
    )
    top_n_sigma: float = parameter(
        0.0,
        "Leave out tokens whose logit is more than N standard deviations of all logits below the highest; 0: none.",
        least=0,
        array="f4",
    )
    repetition_penalty: float = parameter(
        1.0, "Make tokens of the prompt and the answer less likely; 1: none.", above=0, api_most=100, is_advised=True
    )
    presence_penalty: float = parameter(
        0.0, "Subtracted from the logits of tokens in the answer; 0: none.", api_least=-2, api_most=2
    )
    frequency_penalty: float = parameter(
        0.0, "Subtracted from a token's logit for each time that the answer has it; 0: none.", api_least=-2, api_most=2
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = parameter(
        None, "The same seed gives the same text; none: a new one each time.", least=-(2**63), most=2**63 - 1
    )
    n: int = parameter(1, "Answers to each prompt.", least=1, is_in_apis=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep a stop string in the text
    ignore_eos: bool = False
    drafts: bool = True  # verify drafts, if there is a proposer; the output is the same without
    skip_special: bool = True  # leave special tokens out of the text
    logprobs: int | None = parameter(None, "Alternatives reported with each token.", least=0, is_in_apis=False)
    prompt_logprobs: int | None = parameter(
        None, "Alternatives reported with each token of the prompt.", least=0, is_in_apis=False
    )
    embed: bool = False
    allow: "Callable[[abc.Sequence[int]], Tensor | None] | None" = None
    cache_salt: str | None = None
    on_update: ON_UPDATE = "continue"
    lora: str | None = None
    client: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        expected = {name: _expected(getattr(self, name), *declared) for name, declared in PARAMETERS.items()}
        if not all(value < math.inf for value in self.logit_bias.values()):
            expected["logit_bias"] = "numbers by token id"
        if isinstance(self.stop, str) or not all(self.stop):
            expected["stop"] = "a tuple of strings that are not empty"
        if self.on_update not in get_args(ON_UPDATE):
            expected["on_update"] = f"one of {', '.join(get_args(ON_UPDATE))}"
        for name, text in expected.items():
            if text is not None:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}, expected {text}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"SamplingParams: min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_filter(self) -> bool:
        """Whether tokens are left out because they are unlikely."""
        return (self.top_k, self.top_p, self.min_p, self.top_n_sigma) != (0, 1.0, 0.0, 0.0)

    @property
    def is_unfiltered(self) -> bool:
        """Whether it is sampled from the model's distribution, at some temperature."""
        is_adjusted = self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0 or self.allow is not None
        return not is_adjusted and not self.has_filter

    @property
    def is_plain(self) -> bool:
        """Whether `ops.sample` alone does the sampling, so that the device can go on before the host reads tokens."""
        is_adjusted = self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0
        return not is_adjusted and self.allow is None and self.logprobs is None

    @property
    def filters(self) -> tuple[float, ...]:
        """The values of FILTERS, in their order."""
        return tuple(getattr(self, name) for name in FILTERS)


def _expected(value: Any, hint: Any, declared: Parameter) -> str | None:
    """Return what was expected of a value that is not allowed, else None."""
    if value is None and NoneType in get_args(hint):
        return None
    expected = out_of_bounds(value, hint, declared)
    return expected if expected is not None or math.isfinite(value) else "a finite number"


# By name, the type of a parameter and its declaration.
PARAMETERS: dict[str, tuple[Any, Parameter]] = {
    field_.name: (field_.type, declared)
    for field_, declared in options(SamplingParams)
    if isinstance(declared, Parameter)
}
# The parameters that `ops.sample` takes, and the types of their arrays.
FILTERS = {name: declared.array for name, (_, declared) in PARAMETERS.items() if declared.array is not None}


def check_request(
    prompt_ids: abc.Sequence[int], params: SamplingParams, *, vocab_size: int, limit: int, has_tokenizer: bool
) -> None:
    """Raise ValueError if a request could never run. limit: tokens of the longest sequence."""
    length = len(prompt_ids)
    if not prompt_ids:
        raise ValueError("prompt: it has 0 tokens, expected at least 1")
    if bad := [i for i in prompt_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"prompt: token ids {bad[:4]} are outside the vocabulary of {vocab_size}")
    if length >= limit:
        raise ValueError(f"prompt: {length} tokens leave no room for an answer: sequences have up to {limit}")
    if params.max_tokens is not None and length + params.max_tokens > limit:
        raise ValueError(
            f"prompt of {length} tokens and max_tokens {params.max_tokens} make {length + params.max_tokens}: "
            f"sequences have up to {limit}. Set max_tokens to at most {limit - length}, or None for as many as fit"
        )
    if params.min_tokens > (room := limit - length):
        raise ValueError(f"min_tokens is {params.min_tokens}, expected at most {room}, the room after this prompt")
    if params.stop and not has_tokenizer:
        raise ValueError("stop: strings need a tokenizer, and this LLM has none; use stop_token_ids")
    ids = [*params.logit_bias, *params.stop_token_ids]
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(f"logit_bias, stop_token_ids: {bad[:4]} are outside the vocabulary")
    if params.n > 1 and params.prompt_logprobs is not None:
        raise ValueError(f"prompt_logprobs: n is {params.n}, expected 1, because they are the same for every copy")
