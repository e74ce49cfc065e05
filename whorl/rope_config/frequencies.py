"""The frequencies of each rotary type, in float64. docs/rope.md has the formulas and explains them."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from . import RopeConfig

Frequencies = NDArray[np.float64]


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor, 0.1 * mscale * ln(factor) + 1, or 1 where factor is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _exponents(dim: int, denominator: int) -> Frequencies:
    """Return 2i / denominator for the dim / 2 pairs i."""
    return np.arange(0, dim, 2, dtype=np.float64) / denominator


def _plain_frequencies(config: "RopeConfig", base: float | None = None) -> Frequencies:
    return float(config.base if base is None else base) ** -_exponents(config.rotary_dim, config.rotary_dim)


def _default(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    return _plain_frequencies(config)


def _linear(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    return _plain_frequencies(config) / config.factor


def _ntk_frequencies(config: "RopeConfig", stretch: float) -> Frequencies:
    """Raise the base so that the slowest pair is slowed down by `stretch` and the fastest not at all."""
    dim = config.rotary_dim
    return _plain_frequencies(config, config.base * stretch ** (dim / (dim - 2)))


def _dynamic(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    if config.alpha is not None:
        return _ntk_frequencies(config, config.alpha)
    length = max(seq_len or 0, config.max_position)
    return _ntk_frequencies(config, config.factor * length / config.max_position - (config.factor - 1))


def _yarn(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    """Keep pairs that turn more than beta_fast times in the original length; divide those below beta_slow by factor.

    Between the two the frequencies are blended linearly in the pair's index.
    """
    assert config.original_max_position is not None
    dim, original = config.rotary_dim, config.original_max_position

    def pair_turning(turns: float) -> float:
        """Return the (fractional) index of the pair that turns so many times in the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.base))

    low, high = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # an empty ramp becomes a step instead of a division by zero
    slowed = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    plain = _plain_frequencies(config)
    return plain / config.factor * slowed + plain * (1 - slowed)


def _ntk(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    """Slow down pair i by factor to the power ((i + 1) / (R/2)) ** mixed_b: the last pair by the whole factor."""
    pairs = config.rotary_dim // 2
    shares = (np.arange(1, pairs + 1, dtype=np.float64) / pairs) ** config.mixed_b
    return _plain_frequencies(config) * config.factor**-shares


def _mllama4(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    """Return frequencies that the first half of the pairs has for columns, and the other half again for rows."""
    half = config.rotary_dim // 2
    return np.tile(config.base ** -_exponents(half, half), 2)


def _longrope(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    factors = config.long_factor if config.is_long(seq_len) else config.short_factor
    return _plain_frequencies(config) / np.asarray(factors, dtype=np.float64)


def _llama3(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    """Divide the frequencies of long waves by factor, keep those of short waves, and blend between."""
    assert config.original_max_position is not None
    low, high = config.low_freq_factor, config.high_freq_factor
    plain = _plain_frequencies(config)
    turns = config.original_max_position * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return plain * share + plain / config.factor * (1 - share)


def _proportional(config: "RopeConfig", seq_len: int | None) -> Frequencies:
    """Return frequencies of which a share, spaced as over the full head, is not 0; at 0 cos is 1 and sin is 0."""
    frequencies = np.zeros(config.rotary_dim // 2)
    rotating = int(config.proportion * config.head_dim // 2)
    frequencies[:rotating] = config.base ** -_exponents(2 * rotating, config.head_dim)
    return frequencies / config.factor


FREQUENCIES: dict[str, Callable[["RopeConfig", int | None], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "deepseek_llama_scaling": _yarn,
    "telechat3-yarn": _yarn,
    "ntk": _ntk,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "xdrope": _dynamic,
    "openpangu": _default,
    "mllama4": _mllama4,
}
