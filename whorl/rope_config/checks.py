"""The values that the fields of a RopeConfig may have, and checks that the fields agree."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import RopeConfig

# style: which two channels rotate together. half: i and i + R/2 (Llama, GPT-NeoX); pairs: 2i and 2i + 1 (GPT-J).
# pairs_out: the order in which style "pairs" writes its result: as it was read, or in half order (DeepSeek-V3).
STYLES = ("half", "pairs")
# where: whether the first or the last R of the D channels of a head rotate.
WHERE = ("leading", "trailing")
# layout: which axis the R/2 rotary pairs follow. chunked: contiguous bands t, h, w; interleaved: h and w have every
# third pair, t the others; hwt: h and w alternate, then t; spread: see `RopeConfig.spread`.
LAYOUTS = ("chunked", "interleaved", "hwt", "spread")
YARN_TYPES = ("yarn", "deepseek_yarn", "deepseek_llama_scaling", "telechat3-yarn")
# Types that vLLM's get_rope knows and that no configuration suffices for, with what is missing.
UNCOMPUTABLE = {
    "fope": "the coefficients that mix its cosines and sines were learned (cos_coef and sin_coef of the checkpoint)",
}
MOST = 1 << 40  # positions: far above real values
# The keys that each type requires. `dynamic` requires factor or alpha, which is checked separately.
REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "yarn": ("factor",),
    "deepseek_yarn": ("factor",),
    "deepseek_llama_scaling": ("factor",),
    "telechat3-yarn": ("factor",),
    "ntk": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
    "xdrope": ("alpha", "xdrope_section"),
    "openpangu": ("mrope_section", "mrope_interleaved"),
    "mllama4": (),
}


# Keys of a rope dict whose value is true or false.
SWITCHES = ("mrope_interleaved", "truncate", "apply_yarn_scaling", "use_fope")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"RopeConfig: {name} must be a positive integer, found {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"RopeConfig: {name} {value!r} is unknown; known are {list(choices)}")


def check(config: "RopeConfig") -> None:
    """Raise ValueError where the fields of a configuration are out of range or contradict each other."""
    for name in ("head_dim", "rotary_dim", "max_position"):
        check_positive(name, getattr(config, name))
    check_choice("rope_type", config.rope_type, tuple(REQUIRED))
    check_choice("style", config.style, STYLES)
    check_choice("pairs_out", config.pairs_out, STYLES[::-1])
    check_choice("where", config.where, WHERE)
    problems = (_size_problems, _section_problems, _scaling_problems, _dual_chunk_problems)
    if problem := next((problem for of in problems for problem in of(config)), None):
        raise ValueError(f"RopeConfig: {problem}")


def _size_problems(config: "RopeConfig") -> Iterator[str]:
    if config.direction not in (1, -1):
        yield f"direction must be 1 or -1, found {config.direction!r}"
    if config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        yield f"rotary_dim must be even and at most head_dim {config.head_dim}, found {config.rotary_dim}"
    if config.base <= 1 or config.factor <= 0:
        yield f"base must be above 1 and factor above 0, found base {config.base}, factor {config.factor}"


def _section_problems(config: "RopeConfig") -> Iterator[str]:
    sections, layout, pairs = config.sections, config.layout, config.rotary_dim // 2
    if sections is None:
        if layout is not None:
            yield f"layout {layout!r} without sections; expected sections or no layout"
        return
    check_choice("layout", layout, LAYOUTS)
    subject, counts = f"sections {list(sections)}, layout {layout!r}", (2, 3) if layout == "spread" else (3, 4)
    if len(sections) not in counts or min(sections) < 0:
        yield f"{subject}: expected {counts[0]} or {counts[1]} counts of channels"
    if sum(sections) != pairs:
        yield f"{subject}: sum is {sum(sections)}, rotary pairs (rotary_dim / 2) are {pairs}"
    if layout == "spread" and sections[0] == 0:
        yield f"{subject}: the last pair follows the first axis, whose count must be above 0"
    if layout in ("interleaved", "hwt") and len(sections) != 3:
        yield f"{subject}: this layout has exactly 3 axes, found {len(sections)}"
    if layout == "interleaved" and max(3 * sections[1] - 2, 3 * sections[2] - 1) >= pairs:
        yield f"{subject}: stride 3 runs past the {pairs} rotary pairs and loses channels"
    if layout == "hwt" and sections[0] != sections[1]:
        yield f"{subject}: h and w alternate, so their sections must be equal"


def _scaling_problems(config: "RopeConfig") -> Iterator[str]:
    kind, size, sections = config.rope_type, config.rotary_dim, config.sections
    if kind in (*YARN_TYPES, "longrope", "llama3") and config.original_max_position is None:
        yield f"rope_type {kind!r} needs original_max_position, found None"
    if kind == "xdrope" and (config.alpha is None or sections is None):
        yield f"rope_type 'xdrope' needs alpha and sections, found {config.alpha} and {sections}"
    if kind == "openpangu" and config.layout != "spread":
        yield f"rope_type 'openpangu' has layout 'spread', found {config.layout!r}"
    is_square = math.isqrt(config.max_position) ** 2 == config.max_position
    if kind == "mllama4" and (not is_square or size % 4 or config.style != "pairs" or sections):
        yield (
            "rope_type 'mllama4' needs a square number of patches (max_position), rotary_dim a multiple of 4, style "
            f"'pairs' and no sections; found {config.max_position}, {size}, {config.style!r} and {sections}"
        )
    if kind in ("dynamic", "xdrope") and size <= 2:
        yield f"rope_type {kind!r} needs rotary_dim above 2, found {size}"
    low, high = config.low_freq_factor, config.high_freq_factor
    if kind == "llama3" and low >= high:
        yield f"llama3 needs low_freq_factor below high_freq_factor, found {low} and {high}"
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        length = None if getattr(config, name) is None else len(getattr(config, name))
        if length != size // 2:
            yield f"{name} needs one number per rotary pair: {size // 2}, found {length}"


def _dual_chunk_problems(config: "RopeConfig") -> Iterator[str]:
    if config.chunk_size is None and config.local_size is None:
        return
    chunk, local = config.chunk_size or 0, config.local_size or 0
    if not 0 < local < chunk:
        yield f"dual chunk needs 0 < local_size < chunk_size, found {local} and {chunk}"
    if config.sections is not None or config.rope_type != "default":
        yield (
            "dual chunk needs plain positions and rope_type 'default', "
            f"found rope_type {config.rope_type!r}, sections {config.sections}"
        )


def check_types(scaling: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of a rope dict that has the wrong type.

    rope_type and type are strings, sections, short_factor and long_factor lists of numbers, all others numbers.
    """
    for name, value in scaling.items():
        if value is None or (name in SWITCHES and isinstance(value, bool)):
            continue
        if name in ("rope_type", "type"):
            is_right, expected = isinstance(value, str), "a name"
        elif name in ("short_factor", "long_factor", "mrope_section", "xdrope_section"):
            is_right, expected = isinstance(value, list | tuple) and all(map(_is_number, value)), "a list of numbers"
        else:
            is_right, expected = _is_number(value), "a number"
        if is_right and name in ("short_factor", "long_factor"):
            is_right, expected = all(factor > 0 for factor in value), "a list of numbers above 0"
        if is_right and name == "original_max_position_embeddings":
            is_right, expected = 1 < value < MOST, f"2 to {MOST}"
        if not is_right:
            raise ValueError(f"RopeConfig: {name} is {value!r}, expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require(rope_type: str, scaling: Mapping[str, Any]) -> None:
    """Raise ValueError where a rope dict lacks a key that its type requires."""
    missing = [key for key in REQUIRED[rope_type] if key not in scaling]
    missing += [key for key in ("low_freq_factor", "high_freq_factor") if key in scaling and scaling[key] is None]
    if "mrope_section" in scaling and "xdrope_section" in missing:
        missing.remove("xdrope_section")
    if rope_type == "dynamic" and not scaling.get("factor") and not scaling.get("alpha"):
        missing.append("factor or alpha")
    if missing:
        raise ValueError(f"RopeConfig: rope_type {rope_type!r} needs {missing}, found {sorted(scaling)}")
