"""whorl's operators in a Llama, Qwen or GLM-4V model of transformers, by one explicit call; _FAMILIES lists them.

`install(model)` sets methods on that model's modules; no class and no module of transformers changes, so another model
in the same process stays as it was. Parameters, buffers, hooks and the state dict are not touched.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.adapters._install import Installation
from whorl.ops.rope import table_dtype

_NAME = "whorl.adapters.transformers"
_OLDEST = (5, 17)
_ROLES = ("Attention", "Experts", "MLP", "RMSNorm", "RotaryEmbedding")


@dataclass(frozen=True, slots=True)
class _Family:
    """The classes of one of transformers' folders, and how they compute.

    A class name is `prefix` and one of _ROLES ("LlamaAttention"), but for those in `names`. tower: the class of the
    vision tower. layout: how the pairs of channels share the three axes of positions; style: which channels are a pair;
    plus_one: whether norms multiply by 1 + weight.
    """

    prefix: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tower: str = ""
    layout: Literal["chunked", "interleaved"] = "interleaved"
    style: Literal["half", "pairs"] = "half"
    plus_one: bool = False

    def classes(self) -> Iterator[tuple[str, str]]:
        """Yield each class name and its role."""
        for role in _ROLES:
            for name in self.names.get(role, (self.prefix + role,)):
                yield name, role


# By transformers' folder.
_FAMILIES = {
    "llama": _Family("Llama"),
    "qwen3": _Family("Qwen3"),
    "qwen3_moe": _Family("Qwen3Moe"),
    "qwen3_vl": _Family("Qwen3VLText", tower="Qwen3VLVisionModel"),
    "qwen3_vl_moe": _Family("Qwen3VLMoeText", tower="Qwen3VLMoeVisionModel"),
    "qwen3_5": _Family(
        "Qwen3_5", {"RotaryEmbedding": ("Qwen3_5TextRotaryEmbedding",)}, "Qwen3_5VisionModel", plus_one=True
    ),
    "qwen3_5_moe": _Family(
        "Qwen3_5Moe", {"RotaryEmbedding": ("Qwen3_5MoeTextRotaryEmbedding",)}, "Qwen3_5MoeVisionModel", plus_one=True
    ),
    "qwen2_vl": _Family("Qwen2VL", {"MLP": ("Qwen2MLP",)}, "Qwen2VisionTransformerPretrainedModel", "chunked"),
    "qwen2_5_vl": _Family("Qwen2_5_VL", {"MLP": ("Qwen2MLP",)}, "Qwen2_5_VisionTransformerPretrainedModel", "chunked"),
    "glm4v": _Family("Glm4vText", {"RMSNorm": ("Glm4vRMSNorm",)}, "Glm4vVisionModel", "chunked", "pairs"),
    "glm4v_moe": _Family(
        "Glm4vMoeText", {"RMSNorm": ("Glm4vMoeTextRMSNorm", "Glm4vMoeRMSNorm")}, "Glm4vMoeVisionModel", "chunked"
    ),
}
# (module, class name) -> role and family, of the classes that `install` knows; and the vision towers, of which it
# replaces the RMSNorms alone.
_KNOWN = {
    (f"transformers.models.{folder}.modeling_{folder}", name): (role, family)
    for folder, family in _FAMILIES.items()
    for name, role in family.classes()
}
_TOWERS = {(f"transformers.models.{folder}.modeling_{folder}", family.tower) for folder, family in _FAMILIES.items()}
_APPLY = "apply_rotary_pos_emb"


@dataclass(frozen=True, slots=True)
class Kept:
    """A module, or method, that an installation leaves as it is on purpose, and why."""

    path: str
    why: str


class TransformersInstallation(Installation):
    """What `install` replaced in one model; print it for a table. `kept` lists what it left alone on purpose."""

    def __init__(self, name: str = _NAME) -> None:
        super().__init__(name)
        self.kept: list[Kept] = []

    def set_method(self, place: "KnownModule", name: str, function: Callable[..., Any], why: str) -> None:
        """Set a method on one module; it is bound to the module, so a deep copy of the model gets its own.

        Raises RuntimeError when the module already has a method of that name.
        """
        module = place.module
        if name in vars(module):
            raise RuntimeError(
                f"{self.name}: {place.path} already has its own {name}, which a replacement would drop: from another "
                "installation (uninstall() it first) or another library (accelerate's hooks, hub kernels, Liger: "
                "install before those)."
            )
        self.replace(module, name, MethodType(function, module), why, place.path)

    def __str__(self) -> str:
        rows = Counter((_any_layer(f"{e.path}.{e.name}"), e.why) for e in self.replaced)
        left_alone = Counter((_any_layer(e.path), f"kept: {e.why}") for e in self.kept)
        lines = [(str(count), where, why) for (where, why), count in (rows + left_alone).items()]
        widths = [max((len(line[i]) for line in lines), default=0) for i in range(2)]
        head = f"{self.name}: {len(self._replaced)} methods replaced"
        return "\n".join([head, *(f"  {n:>{widths[0]}} x {w:<{widths[1]}}  {why}" for n, w, why in lines)])


def install(
    model: nn.Module,
    *,
    rope: bool = True,
    norm: bool = True,
    swiglu: bool = True,
    qk_norm_rope: bool = False,
) -> TransformersInstallation:
    """Make `model` use whorl's operators.

    rope: rotate q and k of every layer with `ops.rope`, by cos and sin in fp32; axes are merged once per forward.
    norm: compute every RMSNorm with `ops.rms_norm`.
    swiglu: compute gate and up with `ops.glu`; in experts, too, where transformers groups or batches them.
    qk_norm_rope: compute the norms of q and k and the rotation as one `ops.qk_norm_rope`, in place of `rope`.
    Returns the installation; its `uninstall()` restores everything. Raises ValueError for a model without known modules
    and for an option that the model has no modules for, RuntimeError for an old transformers or a method that another
    library has replaced.
    Example: with install(model): model.generate(...)
    """
    if not (rope or norm or swiglu or qk_norm_rope):
        raise ValueError(f"{_NAME}: all options are False; set rope, norm, swiglu or qk_norm_rope.")
    _check_version()
    modules = KnownModules.find(model)
    if not modules.known:
        raise ValueError(
            f"{_NAME}: no module of {type(model).__name__} is known. Looked for attention, MLP, experts, RMSNorm and "
            f"rotary classes of transformers' {', '.join(_FAMILIES)}; found {_classes(model)}."
        )
    installation = TransformersInstallation()
    with installation.building():
        if rope or qk_norm_rope:
            _install_rotation(installation, modules, fused=qk_norm_rope)
        if norm:
            _install_norms(installation, modules, heads=not qk_norm_rope)
        if swiglu:
            _install_swiglu(installation, modules)
    for tower in modules.towers:
        has_norms = any(entry.path.startswith(f"{tower}.") for entry in modules.known.get("RMSNorm", ()))
        parts = "rotary and MLP" if norm and has_norms else "rotary, norms and MLP"
        installation.kept.append(Kept(tower, f"the vision tower's own {parts}"))
    return installation


# ---- finding


@dataclass(frozen=True, slots=True)
class KnownModule:
    """A module of the model, its name there and its family."""

    path: str
    module: Any  # an nn.Module, whose attributes depend on its role
    family: _Family


@dataclass(frozen=True, slots=True)
class KnownModules:
    """The known modules of a model, by role."""

    known: dict[str, list[KnownModule]] = field(default_factory=dict)
    towers: list[str] = field(default_factory=list)  # paths of vision towers

    @classmethod
    def find(cls, model: nn.Module) -> "KnownModules":
        modules = cls()
        for path, module in model.named_modules():
            if (known := _role(module)) is not None:
                role, family = known
                modules.known.setdefault(role, []).append(KnownModule(path, module, family))
            elif any((c.__module__, c.__name__) in _TOWERS for c in type(module).__mro__):
                modules.towers.append(path)
        return modules

    def require(self, role: str, switch: str) -> list[KnownModule]:
        """Return the modules of a role; raises ValueError, naming the option, if there are none."""
        if role not in self.known:
            counts = {known_role: len(entries) for known_role, entries in self.known.items()}
            raise ValueError(f"{_NAME}: {switch}=True needs {role} modules; found {counts}. Pass {switch}=False.")
        return self.known[role]


def _role(module: nn.Module) -> tuple[str, _Family] | None:
    """Return a module's role and family; a subclass counts only if it has its base's forward, the one we know."""
    for base in type(module).__mro__:
        known = _KNOWN.get((base.__module__, base.__name__))
        if known is not None:
            return known if type(module).forward is base.forward else None  # type: ignore[attr-defined]
    return None


def _classes(model: nn.Module) -> str:
    counts = Counter(type(m).__name__ for m in model.modules() if not type(m).__module__.startswith("torch."))
    return ", ".join(f"{n} x {name}" for name, n in counts.most_common(12)) or "torch modules only"


def _any_layer(path: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def _check_version() -> None:
    installed = version("transformers")
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) < _OLDEST:
        raise RuntimeError(
            f"{_NAME}: transformers {installed} is installed, expected {'.'.join(map(str, _OLDEST))} or later."
        )


# ---- rotation


def _install_rotation(installation: TransformersInstallation, modules: KnownModules, *, fused: bool) -> None:
    switch = "qk_norm_rope" if fused else "rope"
    all_attentions = modules.require("Attention", switch)
    for rotary in modules.require("RotaryEmbedding", switch):
        owner = rotary.path.rpartition(".")[0]
        sections = getattr(rotary.module, "mrope_section", None)
        kind_of_rows = "rows" if sections is None else "merged rows"
        why = f"cos and sin in fp32, half width: {kind_of_rows} once a forward"
        installation.set_method(rotary, "forward", _rows_forward(rotary.family, sections), why)
        attentions = [entry for entry in all_attentions if entry.path.startswith(f"{owner}." if owner else "")]
        kinds = {type(attention.module) for attention in attentions}
        forwards = {kind: _rotating_forward(kind, rotary.family.style, fused) for kind in kinds}
        for attention in attentions:
            installation.set_method(attention, "forward", *forwards[type(attention.module)])


def _rotating_forward(kind: type, style: str, fused: bool) -> tuple[Callable[..., Any], str]:
    """Return the forward of an attention class with whorl's rotation in it, and its description."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    names = set(_names(forward.__code__))
    if fused:
        ours = _fused_attention(forward.__globals__)
        _check_fused(kind, names, set(_names(ours.__code__)))
        return ours, "q and k through whorl.ops.qk_norm_rope"
    if _APPLY not in names:
        raise RuntimeError(
            f"{_NAME}: {kind.__name__}.forward does not call {_APPLY}; transformers {version('transformers')} is not "
            "supported. Pass rope=False."
        )
    return _with_global(forward, _APPLY, _rotation(style)), "q and k through whorl.ops.rope"


def _check_fused(kind: type, theirs: set[str], ours: set[str]) -> None:
    """Raise ValueError unless our fused attention looks up every name that theirs does.

    Otherwise theirs computes something that ours does not.
    """
    replaced = {_APPLY, "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward", "view", "transpose"}
    different = (theirs - ours - replaced) | ({"q_norm", "k_norm"} - theirs)
    if different:
        raise ValueError(
            f"{_NAME}: qk_norm_rope=True knows an attention that norms q and k heads as transformers 5.17 does; "
            f"{kind.__name__}.forward differs in {sorted(different)}. Pass qk_norm_rope=False."
        )


def _with_global(function: Any, name: str, value: Any) -> Callable[..., Any]:
    """Return a copy of a function that sees one of its globals replaced.

    transformers' attention calls a function of its module by name. Setting that name would change every model of the
    process; setting it around each call would change every thread. The copy runs transformers' own code, of whatever
    version, and only this name differs. Its globals are taken now and have just the names that the code uses.
    `__name__` must not be among them: torch.compile would then look the names up in the module of that name.
    """
    code, scope = function.__code__, function.__globals__
    view = {n: scope[n] for n in _names(code) if n in scope and n != "__name__"}
    view |= {"__builtins__": scope["__builtins__"], name: value}
    copy = FunctionType(code, view, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions defined inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _rows_forward(family: _Family, sections: Sequence[int] | None) -> Callable[..., tuple[Tensor, None]]:
    """Return the replacement of a rotary module's forward; what it returns stands for (cos, sin) in every layer.

    It returns rows [B, S, R] and None. sections: of a module for positions on several axes, or None.
    """

    def rows(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:
        rows = (_own_rows if sections is None else merged_rows)(self, x, position_ids, family.style)
        # Positions may be shared by all sequences. The rows are made contiguous here, once, and not in every layer.
        return rows.to(table_dtype(x.device, x.dtype)).expand(x.shape[0], -1, -1).contiguous(), None

    def merged_rows(self: Any, x: Tensor, position_ids: Tensor, style: str) -> Tensor:
        assert sections is not None
        position_ids = position_ids.expand(len(sections), -1, -1)
        axes, batch, length = position_ids.shape
        # Where the axes are equal, transformers' merge of the axes changes nothing and its forward gives plain rows.
        equal_axes = position_ids.reshape(1, axes * batch, length).expand(axes, -1, -1)
        table = _own_rows(self, x, equal_axes, style).flatten(0, 1)
        index = torch.arange(table.shape[0], device=table.device).view(axes, batch, length)
        return ops.merge_mrope(table, index, sections, family.layout)

    return rows


def _own_rows(self: Any, x: Tensor, position_ids: Tensor, style: str) -> Tensor:
    """Return rows [cos | sin], [*tokens, R] in fp32, from transformers' own forward.

    So its frequencies, their scaling and their updates stay in force. That forward computes in fp32 and rounds to the
    dtype of its x, from which it reads only dtype and device; it gets an empty fp32 x here, so nothing is rounded. It
    gives each angle twice: the width of the table over again, or with adjacent pairs one beside the other.
    """
    cos, sin = type(self).forward(self, x.new_empty(0, dtype=torch.float32), position_ids)
    once = slice(0, None, 2) if style == "pairs" else slice(0, cos.shape[-1] // 2)
    return torch.cat((cos[..., once], sin[..., once]), -1)


def _rotation(style: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the replacement of apply_rotary_pos_emb.

    Its arguments `cos` and `sin` are what the replaced rotary forward returned, see `_rows_forward`.
    """

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        order = {1: "bhsd", 2: "bshd"}[unsqueeze_dim]
        _check_rows(sin)
        q, k = ops.tokens_first(q, order), ops.tokens_first(k, order)
        q, k = ops.rope(q, k, cos, style=style)
        return ops.tokens_first(q, order), ops.tokens_first(k, order)

    return apply_rotary_pos_emb


def _check_rows(sin: Tensor | None) -> None:
    """Raise ValueError if `sin` is transformers' own sine, and not the None of `_rows_forward`."""
    if sin is not None:
        raise ValueError(
            f"{_NAME}: an attention layer got (cos, sin) of transformers. While installed, position_embeddings "
            "must come from this model's own rotary module."
        )


def _fused_attention(names: dict[str, Any]) -> FunctionType:
    """Return transformers' attention with q norm, k norm and rotation as one operator.

    names: the globals of its module. The projections stay three modules, so that adapters and quantised ones keep
    working; joining their outputs is a copy.
    """
    attentions, eager = names["ALL_ATTENTION_FUNCTIONS"], names["eager_attention_forward"]

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, None],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cos_sin, sin = position_embeddings
        _check_rows(sin)
        qkv = torch.cat((self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)), -1)
        num_kv_heads = qkv.shape[-1] // self.head_dim // (self.num_key_value_groups + 2)
        num_heads = num_kv_heads * self.num_key_value_groups
        weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.variance_epsilon
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "eps": eps}
        heads = ops.qk_norm_rope(qkv, *weights, cos_sin, **sizes)
        q, k, v = (ops.tokens_first(x, "bhsd") for x in heads)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = attentions.get_interface(self.config._attn_implementation, eager)
        if hasattr(self, "sliding_window"):
            kwargs["sliding_window"] = self.sliding_window
        dropout = self.attention_dropout if self.training else 0.0
        out, attention = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), attention

    return cast(FunctionType, forward)


# ---- norms and activations


def _install_norms(installation: TransformersInstallation, modules: KnownModules, *, heads: bool) -> None:
    """Replace the forward of the norms.

    heads: also of those of q and k. With qk_norm_rope these are not called; the fused operator reads their weights.
    """
    skipped_paths = () if heads else tuple(f"{entry.path}." for entry in modules.known.get("Attention", ()))
    for norm in modules.require("RMSNorm", "norm"):
        if not norm.path.startswith(skipped_paths):
            forward = _plus_one_norm_forward if norm.family.plus_one else norm_forward
            installation.set_method(norm, "forward", forward, "through whorl.ops.rms_norm")


def _plus_one_norm_forward(self: Any, x: Tensor) -> Tensor:
    # transformers adds and multiplies in fp32 here, and returns x's dtype.
    weight = self.weight if self.weight.dtype == x.dtype else self.weight.float()
    return ops.rms_norm(x, weight, self.eps, plus_one=True)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    # transformers' product of weight and input promotes dtypes, for instance with fp32 weights under autocast.
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return ops.rms_norm(hidden_states.to(dtype), self.weight.to(dtype), self.variance_epsilon)


def _install_swiglu(installation: TransformersInstallation, modules: KnownModules) -> None:
    gated = [*modules.known.get("MLP", ()), *modules.known.get("Experts", ())]
    other_gates = [entry for entry in gated if not _is_silu(_activation(entry))]
    if len(other_gates) == len(gated):
        names = {type(_activation(entry)).__name__ for entry in other_gates}
        activations = sorted(names) or "no MLP or Experts modules"
        raise ValueError(f"{_NAME}: swiglu=True needs a SiLU gate; found {activations}. Pass swiglu=False.")
    for entry in gated:
        if entry in other_gates:
            why = f"its gate is {type(_activation(entry)).__name__}, not SiLU"
            installation.kept.append(Kept(entry.path, why))
        elif entry not in modules.known.get("MLP", ()):
            installation.set_method(entry, "_apply_gate", _apply_gate, "gate and up through whorl.ops.glu")
            if entry.module.config._experts_implementation == "eager":
                why = "the eager loop over experts; set_experts_implementation('grouped_mm') uses ours"
                installation.kept.append(Kept(f"{entry.path}.forward", why))
        elif hasattr(entry.module, "gate_up_proj"):
            installation.set_method(entry, "forward", _joined_mlp_forward, "gate and up through whorl.ops.glu")
        else:
            why = "gate and up, joined, through whorl.ops.glu"
            installation.set_method(entry, "forward", mlp_forward, why)


def _activation(entry: KnownModule) -> object:
    """Return the activation of an MLP or of experts; GLM's name for it is its own."""
    module = entry.module
    return module.activation_fn if hasattr(module, "activation_fn") else module.act_fn


def _is_silu(activation: object) -> bool:
    # transformers' own SiLU class is not an nn.SiLU.
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(ops.glu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1)))


def _joined_mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return self.down_proj(ops.glu(self.gate_up_proj(hidden_states)))


def _apply_gate(self: Any, gate_up_out: Tensor) -> Tensor:
    return ops.glu(gate_up_out)
