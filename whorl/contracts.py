"""What the Ascend operators take, give and cannot do, by version: plain data and pure functions, without torch.

`CONTRACTS` holds torch_npu 2.13's signatures (and one of MindSpeed's), `<operator>_limit` says which documented
device limit a call breaks, `probe` reads what an installed torch_npu really has. The limits are those documented
for Atlas A2 and A3. The operators in `whorl.ops`, `whorl.ascend` and the doctor all read from here.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal

REQUIRED: Final = "<required>"
Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a signature; `since` is the first supported torch_npu release that has it."""

    name: str
    type: str
    default: object = REQUIRED
    keyword_only: bool = False
    since: str = "2.9"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One vendor operator. `namespace` is its torch.ops namespace, None where it is not a torch operator."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: tuple[str, ...]
    gradient: Literal["yes", "raises", "silently lost", "partial"]
    in_place: tuple[str, ...] = ()
    namespace: str | None = "npu"
    library: str = "torch_npu"
    since: str = "2.9"
    changes: tuple[tuple[str, str], ...] = ()
    note: str = ""


def parse_schema(schema: str, since: Mapping[str, str] | None = None) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters and returns of '(Tensor x, *, int dim=-1) -> Tensor'; alias marks such as (a!) are dropped."""
    inputs, outputs = re.sub(r"\([a-z]!\)", "", schema).split(" -> ")
    parameters, keyword_only = [], False
    for part in inputs[inputs.index("(") + 1 : -1].split(", "):
        if part == "*":
            keyword_only = True
            continue
        declared, _, default = part.partition("=")
        kind, name = declared.split()
        value = ast.literal_eval(default) if default else REQUIRED
        parameters.append(Parameter(name, kind, value, keyword_only, (since or {}).get(name, "2.9")))
    return tuple(parameters), tuple(part for part in outputs.strip("()").split(", ") if part)


def _contract(name: str, schema: str, *, since: Mapping[str, str] | None = None, **facts: Any) -> Contract:
    parameters, returns = parse_schema(schema, since)
    return Contract(name=name, parameters=parameters, returns=returns, **facts)


_TABLE = (
    _contract(
        "npu_rotary_mul",
        "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
        since={"rotate": "2.10"},
        gradient="yes",
        changes=(("2.10", "rotate added"),),
        note="input*cos + rot(input)*sin with cos and sin of full width, cast to input's dtype first. "
        "With `rotate` the backward pass still uses rotary_mode: documented as unsupported. Saves input.",
    ),
    _contract(
        "npu_mrope",
        "(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
        "int[]? mrope_section=None, str? rotary_mode='half', str? cache_mode='default') -> (Tensor, Tensor)",
        since={"cache_mode": "2.10"},
        gradient="silently lost",
        changes=(("2.10", "cache_mode added"),),
        note="rotary_mode says which channels pair up ('interleave', not 'interleaved'); cache_mode says which axis "
        "a channel belongs to. cache_mode='interleave' needs the V2 kernel (CANN 9.0.0 or newer).",
    ),
    _contract(
        "npu_interleave_rope",
        "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        gradient="raises",
        note="Reads adjacent pairs and writes half order, as DeepSeek-V3 does: not GPT-J RoPE.",
    ),
    _contract(
        "npu_apply_rotary_pos_emb",
        "(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSND', str rotary_mode='half') "
        "-> (Tensor, Tensor)",
        gradient="raises",
        in_place=("query", "key"),
        changes=(("2.11", "default of layout changed from BSH to BSND"),),
        note="Overwrites query and key and returns them, though its schema declares no mutation: unsafe under "
        "torch.compile. An unknown layout string means BSND on the device.",
    ),
    _contract(
        "_npu_rotary_embedding",
        "(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox_style) -> ()",
        gradient="silently lost",
        in_place=("query", "key"),
        namespace="atb",
        note="Keeps cos and sin of the first call for the life of the process: a second table is ignored. "
        "Needs the NNAL/ATB package; has no meta kernel.",
    ),
    _contract(
        "npu_rotary_position_embedding",
        "(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor",
        gradient="partial",
        namespace=None,
        library="mindspeed",
        note="MindSpeed's own extension over the kernel of npu_rotary_mul; mode 0 is half, 1 is interleave. "
        "cos and sin get a gradient only when both require one.",
    ),
    _contract(
        "npu_rms_norm",
        "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        gradient="yes",
        note="Returns y and rstd; rstd is float32 with the dimensions of gamma set to 1.",
    ),
    _contract(
        "npu_add_rms_norm",
        "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
        gradient="raises",
        note="Returns y, rstd (float32) and x1 + x2, in this order.",
    ),
    _contract(
        "npu_swiglu",
        "(Tensor input, int dim=-1) -> Tensor",
        gradient="yes",
        note="silu(first half) * second half along dim.",
    ),
    # Backward passes by themselves, for callers with their own autograd.
    _contract(
        "npu_rotary_mul_backward",
        "(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> (Tensor, Tensor, Tensor)",
        gradient="silently lost",
        note="Gradients of input, r1 and r2, in input's dtype.",
    ),
    _contract(
        "npu_rms_norm_backward",
        "(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
        gradient="silently lost",
        note="Gradients of input, in its dtype, and of gamma, in float32.",
    ),
    _contract(
        "npu_swiglu_backward",
        "(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
        gradient="silently lost",
    ),
)
CONTRACTS: Final[dict[str, Contract]] = {contract.name: contract for contract in _TABLE}


# Versions and drift.

SUPPORTED_TORCH_NPU: Final[dict[str, str]] = {
    "2.9": "npu_mrope has no cache_mode (interleaved sections are not fused), npu_rotary_mul has no rotate",
    "2.10": "cache_mode and rotate exist; npu_apply_rotary_pos_emb still defaults to layout BSH",
    "2.11": "npu_apply_rotary_pos_emb defaults to layout BSND",
    "2.12": "as 2.11",
    "2.13": "the signatures of CONTRACTS; proven against the wheel",
}


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as '2.10.0.post7+git1a2b'."""
    major, minor = version.split("+")[0].split(".")[:2]
    if not (major.isdigit() and minor.isdigit()):
        raise ValueError(f"torch_npu version {version!r}: expected MAJOR.MINOR[.PATCH...]")
    return int(major), int(minor)


def call_arguments(op: str, available: Sequence[str], **wanted: Any) -> dict[str, Any]:
    """The keyword arguments to call `op` with, where its schema has the arguments named in `available`.

    Every wanted argument the schema has is passed, also when it equals the default, because defaults differ between
    versions. One the schema lacks is left out if it asks for the default and is an error if it does not.
    """
    parameters = {p.name: p for p in CONTRACTS[op].parameters}
    arguments = {}
    for name, value in wanted.items():
        if name not in parameters:
            raise TypeError(f"{op}: no parameter {name!r}. Has: {list(parameters)}")
        if name in available:
            arguments[name] = value
        elif value is not parameters[name].default and value != parameters[name].default:
            asked = f"{name}={value!r}" if isinstance(value, str | int | float | list | tuple) else name
            raise RuntimeError(
                f"{op}: {asked} needs torch_npu {parameters[name].since} or newer; "
                f"the installed schema has {list(available)}"
            )
    return arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What one installed torch_npu has: its version and, per operator, its argument names."""

    version: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def call_arguments(self, op: str, **wanted: Any) -> dict[str, Any]:
        """Keyword arguments for `op` in this version; RuntimeError naming the version that has what is missing."""
        if op not in self.arguments:
            raise RuntimeError(f"torch_npu {self.version} has no {op}; whorl knows it from 2.13")
        return call_arguments(op, self.arguments[op], **wanted)


def probe(version: str, schema_arguments: Mapping[str, Sequence[str]]) -> Installed:
    """Check an installed torch_npu against the table of supported versions and keep what its schemas have."""
    major_minor = "{}.{}".format(*release(version))
    if major_minor not in SUPPORTED_TORCH_NPU:
        raise RuntimeError(
            f"torch_npu {version} is not supported. Supported: {', '.join(SUPPORTED_TORCH_NPU)}. "
            f"Install one of these, or force another backend."
        )
    return Installed(version=version, arguments={op: tuple(names) for op, names in schema_arguments.items()})


def schema_arguments(torch_ops: Any) -> dict[str, tuple[str, ...]]:
    """Argument names of every operator of CONTRACTS that `torch.ops` (passed in, so torch is not imported) has."""
    found = {}
    for contract in CONTRACTS.values():
        packet = getattr(getattr(torch_ops, contract.namespace or "", None), contract.name, None)
        if contract.namespace is not None and packet is not None:
            found[contract.name] = tuple(a.name for a in packet.default._schema.arguments)
    return found


# MRoPE sections.

FUSED_MROPE_SECTIONS: Final = ((16, 24, 24), (24, 20, 20), (8, 12, 12), (16, 16, 16, 16))


def interleaved_axes(sections: Shape, formula: Literal["transformers", "vendor"] = "transformers") -> tuple[int, ...]:
    """Axis (0 t, 1 h, 2 w) of each of the R/2 channels under stride-3 interleaving of sections (t, h, w).

    transformers gives w the channels 2::3 below 3*w; the vendor's published formula stops both h and w at 3*h.
    """
    _, h, w = sections
    ends = {1: 3 * h, 2: 3 * w if formula == "transformers" else 3 * h}
    return tuple(c % 3 if c % 3 and c < ends[c % 3] else 0 for c in range(sum(sections)))


def interleaved_formulas_differ(sections: Shape) -> bool:
    """Whether npu_mrope's cache_mode='interleave' gives some channel another axis than transformers does."""
    return interleaved_axes(sections, "transformers") != interleaved_axes(sections, "vendor")


def vendor_sections(sections: Shape) -> tuple[int, int, int]:
    """The (t, h, w) sections with which transformers' rule gives the channels of the vendor's formula."""
    axes = interleaved_axes(sections, "vendor")
    return axes.count(0), axes.count(1), axes.count(2)


def interleaved_range_reason(sections: Shape) -> str | None:
    """Why stride-3 interleaving cannot honour (t, h, w) sections, or None: h and w need their last channel."""
    if len(sections) != 3:
        return f"interleaving takes 3 sections (t, h, w), got {len(sections)}"
    half = sum(sections)
    for axis, size, last in (("h", sections[1], 3 * sections[1] - 2), ("w", sections[2], 3 * sections[2] - 1)):
        if size > 0 and last >= half:
            return f"{axis}={size} needs channel {last}, there are {half}"
    return None


# Device limits. Each returns None, or the documented limit that the call breaks.

_FLOATS = ("float16", "bfloat16", "float32")
_AXES = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "SBND": (1, 2, 0)}  # where B, N and S are


def _dtype_limit(what: str, dtype: str, allowed: Sequence[str]) -> str | None:
    return None if dtype in allowed else f"{what} must be one of {', '.join(allowed)}, got {dtype}"


def rotary_mul_limit(
    *,
    shape: Shape,
    cos_shape: Shape,
    dtype: str,
    rotary_mode: str = "half",
    layout: str | None = None,
    table_needs_grad: bool = False,
) -> str | None:
    """Limits of npu_rotary_mul; without a `layout` the call fits if it fits as any of BNSD, BSND and SBND."""
    if (reason := _dtype_limit("input", dtype, _FLOATS)) is not None:
        return reason
    if rotary_mode not in ("half", "interleave"):
        return f"rotary_mode must be 'half' or 'interleave', got {rotary_mode!r}"
    if len(shape) != 4 or len(cos_shape) != 4:
        return f"input, cos and sin must be 4-D, got {tuple(shape)} and {tuple(cos_shape)}"
    if shape[-1] % 2 or shape[-1] >= 896:
        return f"head size must be even and below 896, got {shape[-1]}"
    if cos_shape[-1] != shape[-1]:
        return f"cos and sin must have the full head size {shape[-1]}, got {cos_shape[-1]}"
    if layout is not None and layout not in _AXES:
        return f"layout must be one of {', '.join(_AXES)}, got {layout}"
    reasons = [
        _rotary_mul_layout_limit(shape, cos_shape, rotary_mode, name, table_needs_grad)
        for name in ([layout] if layout else _AXES)
    ]
    return None if None in reasons else "; ".join(str(reason) for reason in reasons)


def _rotary_mul_layout_limit(
    shape: Shape, cos_shape: Shape, rotary_mode: str, layout: str, table_needs_grad: bool
) -> str | None:
    b, n, s = _AXES[layout]
    batch, heads = shape[b], shape[n]
    if cos_shape[s] != shape[s]:
        return f"{layout}: cos has {cos_shape[s]} positions, input {shape[s]}"
    if table_needs_grad and batch * heads > 1024:
        return f"{layout}: a gradient of cos and sin needs B*N <= 1024, got {batch * heads}"
    if rotary_mode == "interleave":
        if batch * heads >= 1000:
            return f"{layout}: interleave needs B*N < 1000, got {batch * heads}"
        if (cos_shape[b], cos_shape[n]) != (1, 1):
            return f"{layout}: interleave takes one cos row per position (B = N = 1), got {tuple(cos_shape)}"
        return None
    if batch >= 1000 or heads >= 1000:
        return f"{layout}: B and N must be below 1000, got B={batch}, N={heads}"
    if (cos_shape[b], cos_shape[n]) not in ((1, 1), (batch, 1), (batch, heads)):
        return f"{layout}: cos {tuple(cos_shape)} does not broadcast as 11SD, B1SD or BNSD to {tuple(shape)}"
    return None


def rotary_position_embedding_limit(
    *, shape: Shape, cos_shape: Shape, dtype: str, mode: int = 0, table_needs_grad: bool = False
) -> str | None:
    """Limits of MindSpeed's npu_rotary_position_embedding: those of npu_rotary_mul."""
    if mode not in (0, 1):
        return f"mode must be 0 (half) or 1 (interleave), got {mode}"
    return rotary_mul_limit(
        shape=shape,
        cos_shape=cos_shape,
        dtype=dtype,
        rotary_mode=("half", "interleave")[mode],
        table_needs_grad=table_needs_grad,
    )


def mrope_limit(
    *,
    query_shape: Shape,
    key_shape: Shape,
    positions_shape: Shape,
    rotary_dim: int,
    head_size: int,
    dtype: str,
    table_dtype: str,
    sections: Shape | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> str | None:
    """Limits of npu_mrope. Sections of None or all zeros mean plain RoPE."""
    if (reason := _dtype_limit("query", dtype, _FLOATS)) is not None:
        return reason
    if table_dtype != dtype:
        return f"cos_sin_cache must have query's dtype {dtype}, got {table_dtype}"
    if len(query_shape) != 2 or len(key_shape) != 2:
        return f"query and key must be 2-D [T, heads*head_size], got {tuple(query_shape)} and {tuple(key_shape)}"
    unit = 16 if dtype == "float32" else 32
    if head_size % unit or rotary_dim % unit:
        return f"head_size and rotary size must be multiples of {unit} in {dtype}, got {head_size} and {rotary_dim}"
    if rotary_dim > head_size:
        return f"rotary size {rotary_dim} is larger than head_size {head_size}"
    if query_shape[1] % head_size or key_shape[1] % head_size:
        return f"query and key widths {query_shape[1]} and {key_shape[1]} are not multiples of head_size {head_size}"
    if rotary_mode not in ("half", "interleave"):
        return f"rotary_mode must be 'half' or 'interleave', got {rotary_mode!r}"
    if cache_mode not in ("default", "interleave"):
        return f"cache_mode must be 'default' or 'interleave', got {cache_mode!r}"
    tokens = query_shape[0]
    if key_shape[0] != tokens or positions_shape[-1] != tokens:
        return f"query, key and positions have {tokens}, {key_shape[0]} and {positions_shape[-1]} tokens"
    if sections is None or not any(sections):
        if len(positions_shape) != 1 or cache_mode != "default":
            return (
                f"plain RoPE takes positions [T] and cache_mode 'default', got {tuple(positions_shape)}, {cache_mode!r}"
            )
        return None
    return _mrope_section_limit(sections, positions_shape, rotary_dim, cache_mode)


def _mrope_section_limit(sections: Shape, positions_shape: Shape, rotary_dim: int, cache_mode: str) -> str | None:
    if sum(sections) * 2 != rotary_dim:
        return f"sections {list(sections)} sum to {sum(sections)}, half the rotary size is {rotary_dim // 2}"
    if len(positions_shape) != 2 or positions_shape[0] != len(sections):
        return f"positions must be [{len(sections)}, T] for sections {list(sections)}, got {tuple(positions_shape)}"
    if tuple(sections) not in FUSED_MROPE_SECTIONS:
        documented = ", ".join(str(list(s)) for s in FUSED_MROPE_SECTIONS)
        return f"sections {list(sections)} are not documented; npu_mrope documents {documented}"
    if len(sections) == 4 and cache_mode != "default":
        return f"four sections take cache_mode 'default', got {cache_mode!r}"
    return None


def interleave_rope_limit(
    *, shape: Shape, cos_shape: Shape, dtype: str, table_dtype: str, contiguous: bool = True
) -> str | None:
    """Limits of npu_interleave_rope: x [B, N, S, 64], cos and sin [B, 1, S or 1, 64]."""
    if (reason := _dtype_limit("x", dtype, ("float16", "bfloat16"))) is not None:
        return reason
    if table_dtype != dtype:
        return f"cos and sin must have x's dtype {dtype}, got {table_dtype}"
    if len(shape) != 4 or shape[-1] != 64:
        return f"x must be [B, N, S, 64], got {tuple(shape)}"
    if tuple(cos_shape) not in ((shape[0], 1, shape[2], 64), (shape[0], 1, 1, 64)):
        return f"cos and sin must be [{shape[0]}, 1, {shape[2]} or 1, 64], got {tuple(cos_shape)}"
    return None if contiguous else "x, cos and sin must be contiguous"


def apply_rotary_pos_emb_limit(
    *,
    query_shape: Shape,
    key_shape: Shape,
    cos_shape: Shape,
    dtype: str,
    table_dtype: str,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> str | None:
    """Limits of npu_apply_rotary_pos_emb: [B, S, N, D] or [T, N, D], D 64 or 128, one cos row per token."""
    if (reason := _dtype_limit("query", dtype, _FLOATS)) is not None:
        return reason
    if table_dtype != dtype:
        return f"cos and sin must have query's dtype {dtype}, got {table_dtype}"
    if layout not in ("BSND", "TND"):
        return f"layout must be 'BSND' or 'TND', got {layout!r}"
    if rotary_mode != "half":
        return f"rotary_mode must be 'half', got {rotary_mode!r}"
    if len(query_shape) != len(layout) or len(key_shape) != len(layout):
        return f"{layout} query and key must be {len(layout)}-D, got {tuple(query_shape)} and {tuple(key_shape)}"
    if not prod(query_shape) or not prod(key_shape):
        return f"empty tensors are not taken, got {tuple(query_shape)} and {tuple(key_shape)}"
    if query_shape[-1] not in (64, 128) or key_shape[-1] != query_shape[-1]:
        return f"head size must be 64 or 128 in query and key, got {query_shape[-1]} and {key_shape[-1]}"
    tokens = tuple(query_shape[:-2])
    if tuple(key_shape[:-2]) != tokens or tuple(cos_shape) != (*tokens, 1, query_shape[-1]):
        return f"cos and sin must be {(*tokens, 1, query_shape[-1])} (no broadcast), got {tuple(cos_shape)}"
    return None


def rotary_embedding_limit(
    *, query_shape: Shape, key_shape: Shape, positions_shape: Shape, rotary_dim: int, head_size: int, dtype: str
) -> str | None:
    """Limits of ATB's _npu_rotary_embedding."""
    if (reason := _dtype_limit("query", dtype, ("float16", "bfloat16"))) is not None:
        return reason
    if len(query_shape) != 2 or len(key_shape) != 2 or len(positions_shape) != 1:
        return f"query and key must be 2-D and positions 1-D, got {tuple(query_shape)} and {tuple(positions_shape)}"
    if not query_shape[0] == key_shape[0] == positions_shape[0]:
        return f"query, key and positions have {query_shape[0]}, {key_shape[0]} and {positions_shape[0]} tokens"
    if rotary_dim != head_size:
        return f"partial rotary is not taken: rotary size {rotary_dim}, head_size {head_size}"
    return None


def rms_norm_limit(*, shape: Shape, gamma_shape: Shape, dtype: str, gamma_dtype: str) -> str | None:
    """Limits of npu_rms_norm: gamma is the trailing dimensions, in input's dtype or float32."""
    if (reason := _dtype_limit("input", dtype, _FLOATS)) is not None:
        return reason
    if gamma_dtype not in (dtype, "float32"):
        return f"gamma must be {dtype} or float32, got {gamma_dtype}"
    return _gamma_limit(shape, gamma_shape)


def _gamma_limit(shape: Shape, gamma_shape: Shape) -> str | None:
    trailing = tuple(shape[len(shape) - len(gamma_shape) :])
    if not gamma_shape or len(gamma_shape) > len(shape) or tuple(gamma_shape) != trailing:
        return f"gamma must have the trailing dimensions of {tuple(shape)}, got {tuple(gamma_shape)}"
    return None


def add_rms_norm_limit(
    *, shape: Shape, x2_shape: Shape | None = None, gamma_shape: Shape, dtype: str, gamma_dtype: str
) -> str | None:
    """Limits of npu_add_rms_norm: gamma in x1's dtype, nothing empty."""
    if (reason := _dtype_limit("x1", dtype, _FLOATS)) is not None:
        return reason
    if x2_shape is not None and tuple(x2_shape) != tuple(shape):
        return f"x1 and x2 must have one shape, got {tuple(shape)} and {tuple(x2_shape)}"
    if gamma_dtype != dtype:
        return f"gamma must be {dtype}, got {gamma_dtype}"
    return _gamma_limit(shape, gamma_shape) or (None if prod(shape) else f"empty tensors are not taken, got {shape}")


def swiglu_limit(*, shape: Shape, dim: int = -1, dtype: str, contiguous: bool = True) -> str | None:
    """Limits of npu_swiglu: 1 to 8 dimensions, an even size along dim, contiguous, not empty."""
    if (reason := _dtype_limit("input", dtype, _FLOATS)) is not None:
        return reason
    if not 1 <= len(shape) <= 8 or not -len(shape) <= dim < len(shape):
        return f"input must have 1 to 8 dimensions with dim {dim} among them, got {tuple(shape)}"
    if shape[dim] % 2:
        return f"size along dim {dim} must be even, got {shape[dim]}"
    if not prod(shape):
        return f"empty tensors are not taken, got {tuple(shape)}"
    return None if contiguous else "input must be contiguous"
