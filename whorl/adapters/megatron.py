"""whorl's rotary operators in a Megatron-core model: one call for q and k in every self-attention, MRoPE included.

`install(model)` changes that model's objects, never a Megatron class. Layers still receive a tensor in the shape that
Megatron passes to them, so recomputation, pipelining and graphs see nothing new, and the switch can be turned at any
step. The code calls that tensor `carried`: angles, or positions with operator "mrope".

With an inference context only the new tokens are rotated, before their keys are cached. Megatron's static context
caches unrotated keys and rotates all of them in every step, so a context continues as it began.
"""

import inspect
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whorl.adapters._install import Installation
from whorl.ops import merge_mrope, rope
from whorl.ops.rope import mrope_axes, table_dtype
from whorl.positions import context_slice, packed_positions

Operator = Literal["rope", "mrope"]
Layout = Literal["chunked", "interleaved"]
# The method of Megatron's Attention that receives q, k and the rotary embedding directly before they are rotated.
_SITE = "_adjust_key_value_for_inference"
_SITE_ARGUMENTS = ["inference_context", "query", "key", "value", "rotary_pos_emb"]


class MegatronInstallation(Installation):
    """What `install` replaced in a Megatron model.

    enabled: the switch; False sends every later call to Megatron's own code. calls: counts, since installation, which
    operator ran, or why Megatron's own code ran.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__("whorl.adapters.megatron")
        self.enabled = enabled
        self.calls: Counter[str] = Counter()


def install(
    model: nn.Module | Sequence[nn.Module],
    *,
    operator: Operator = "rope",
    layout: Layout | None = None,
    max_position: int | None = None,
    enabled: bool = True,
) -> MegatronInstallation:
    """Rotate q and k of every self-attention of `model` (or of its pipeline chunks) with whorl's operators.

    operator: "rope" passes angles to the layers; cos and sin are computed once per step and shared by the layers.
        "mrope" passes positions, which are looked up in a table of `max_position` rows once per step (MRoPE models
        only).
    layout: how an MRoPE model assigns its sections to channels, "chunked" or "interleaved". None: chunked for
        Megatron's own rotary class; a class of another library still computes its angles itself.
    max_position: the rows of the table of operator "mrope"; every position must be below it.
    enabled: False installs with the switch off.
    Returns the installation. Raises ValueError for options that do not fit the model, RuntimeError for an unsupported
    version and for a second installation before `uninstall()`.
    Example: installation = install(model); ...; installation.uninstall()
    """
    if operator not in ("rope", "mrope"):
        raise ValueError(f"megatron.install: operator is {operator!r}, expected 'rope' or 'mrope'.")
    if operator == "mrope" and not max_position:
        raise ValueError(
            "megatron.install: operator 'mrope' looks positions up in a table; give its rows as max_position."
        )
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    owners = [module for chunk in chunks for module in chunk.modules() if _has_rotary(module)]
    if not owners:
        raise ValueError(
            "megatron.install: no module with a rotary_pos_emb was found; "
            "is position_embedding_type one of 'rope', 'yarn', 'mrope'?"
        )
    installation = MegatronInstallation(enabled)
    with installation.building():
        for owner in owners:
            _install_one(installation, owner, operator, layout, max_position)
    return installation


def _has_rotary(module: nn.Module) -> bool:
    """Return whether a module is a language model with rotary embeddings.

    A vision tower has no position_embedding_type.
    """
    rotary = getattr(module, "rotary_pos_emb", None)
    return isinstance(rotary, nn.Module) and hasattr(module, "position_embedding_type")


def _install_one(
    installation: MegatronInstallation, owner: Any, operator: Operator, layout: Layout | None, max_position: int | None
) -> None:
    rotary = owner.rotary_pos_emb
    is_multimodal = "position_ids" in inspect.signature(type(rotary).forward).parameters
    _check_owner(owner, is_multimodal, operator, layout)
    if is_multimodal and layout is None and isinstance(rotary, _megatron_class("multimodal")):
        layout = "chunked"
    if operator == "mrope" and layout is None:
        raise ValueError(
            f"megatron.install: {type(rotary).__name__} is not Megatron's; give its layout for operator 'mrope'."
        )
    embedding = _RotaryEmbedding(installation, owner, is_multimodal, operator, layout, max_position)
    if layout is not None:
        installation.replace(
            rotary, "forward", embedding.rotary_forward, f"{layout} MRoPE for packed and parallel slices"
        )
    attention_class: Any = _megatron_class("attention")
    for attention in owner.modules():
        if isinstance(attention, attention_class) and attention.attention_type == "self":
            _check_attention(attention)
            site = _Site(attention, embedding)
            installation.replace(attention, "forward", site.forward, "to know the packed sequences of the call")
            installation.replace(attention, _SITE, site.adjust, "q and k through whorl.ops.rope")


def _megatron_class(kind: str) -> type:
    module, name = {
        "multimodal": ("megatron.core.models.common.embeddings.rotary_pos_embedding", "MultimodalRotaryEmbedding"),
        "attention": ("megatron.core.transformer.attention", "Attention"),
    }[kind]
    try:
        megatron_class: type = getattr(import_module(module), name)
    except ImportError as error:
        raise RuntimeError("megatron.install needs megatron-core: pip install megatron-core==0.16.1") from error
    return megatron_class


def _check_owner(owner: Any, is_multimodal: bool, operator: str, layout: str | None) -> None:
    name, kind = type(owner).__name__, type(owner.rotary_pos_emb).__name__
    embedding_type = owner.position_embedding_type
    if is_multimodal != (embedding_type == "mrope"):
        raise ValueError(
            f"megatron.install: {name} takes the {embedding_type!r} branch but its rotary embedding is {kind}, which "
            f"takes {'position ids' if is_multimodal else 'a sequence length'}. Set position_embedding_type="
            f"{'mrope' if is_multimodal else 'rope'!r} in the configuration (it overrides the constructor's argument)"
            f"{', mrope_section, and apply_rope_fusion=False' if is_multimodal else ''}."
        )
    if owner.config.multi_latent_attention:
        raise ValueError(f"megatron.install: {name} uses multi-latent attention, which rotates elsewhere.")
    if not is_multimodal and (operator == "mrope" or layout is not None):
        raise ValueError(f"megatron.install: operator 'mrope' and layout are for MRoPE models; {name} uses {kind}.")
    frequencies = owner.rotary_pos_emb.inv_freq
    if frequencies.dtype != torch.float32:
        raise ValueError(f"megatron.install: inv_freq of {kind} is {frequencies.dtype}; angles need torch.float32.")
    if is_multimodal and sum(owner.mrope_section) != frequencies.numel():
        raise ValueError(
            f"megatron.install: mrope_section {owner.mrope_section} sums to {sum(owner.mrope_section)}, "
            f"{kind} has {frequencies.numel()} channels."
        )


def _check_attention(attention: Any) -> None:
    site = getattr(type(attention), _SITE, None)
    arguments = [] if site is None else list(inspect.signature(site).parameters)[1:6]
    if arguments != _SITE_ARGUMENTS or "packed_seq_params" not in inspect.signature(type(attention).forward).parameters:
        raise RuntimeError(
            f"megatron.install: {type(attention).__name__}.{_SITE} takes {arguments}, expected {_SITE_ARGUMENTS} as in "
            "megatron-core 0.16.1; this version is not supported."
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """What is known where q and k are rotated: the tokens, how they are packed, and which part of them this rank has.

    tokens, batch: S (T when packed) and B of this rank's q; cu_seqlens: the bounds of packed sequences; rank, size: in
    the context-parallel group; mscale: YaRN's attention factor; dtype: that of q; start: with a static inference
    context, where the tokens begin in the sequence; positions: those of a dynamic context, one per token.
    """

    tokens: int
    batch: int
    cu_seqlens: Tensor | None = field(compare=False)
    rank: int
    size: int
    mscale: float
    dtype: torch.dtype
    start: int | None = None
    positions: Tensor | None = field(default=None, compare=False)


# The arguments of `ops.rope`: a row of cos and sin for each token and None, or a table and positions.
_RotaryArguments = tuple[Tensor, Tensor | None]


class _RotaryEmbedding:
    """One rotary embedding of the model: its options, and the operator's arguments that its attention layers share."""

    def __init__(
        self,
        installation: MegatronInstallation,
        owner: Any,
        is_multimodal: bool,
        operator: Operator,
        layout: Layout | None,
        max_position: int | None,
    ) -> None:
        rotary = owner.rotary_pos_emb
        self.installation = installation
        self.is_multimodal = is_multimodal
        self.operator = operator
        self.layout: Layout = layout or "chunked"
        self.max_position = max_position
        self.sections: list[int] = list(owner.mrope_section) if is_multimodal else []
        self.style: Literal["half", "pairs"] = "pairs" if rotary.rotary_interleaved else "half"
        self._inv_freq: Tensor = rotary.inv_freq
        self._stretch: float | None = rotary.seq_len_interpolation_factor
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._last: tuple[Tensor, Tensor | None, tuple[_Call, int, int], _RotaryArguments] | None = None

    def rotary_forward(
        self, position_ids: Tensor, mrope_section: Sequence[int] | None = None, *_: Any, **__: Any
    ) -> Tensor:
        """Compute what the layers get; this replaces the forward of an MRoPE object.

        position_ids: [3, B, N], or [B, N] where the axes are equal. Returns angles [N, B, 1, R], or positions
        [N, B, 1, 3] with operator "mrope", of the full sequence; each attention takes this rank's part.
        """
        if mrope_section is not None and list(mrope_section) != self.sections:
            raise ValueError(
                f"megatron: mrope_section is {list(mrope_section)}, expected {self.sections} as at installation."
            )
        if position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        if position_ids.dim() != 3 or position_ids.shape[0] != 3:
            raise ValueError(f"megatron: position_ids is {list(position_ids.shape)}, expected [3, B, S].")
        positions = position_ids.permute(2, 1, 0).unsqueeze(2).contiguous()  # [N, B, 1, 3]
        return positions if self.operator == "mrope" else self._angles(positions)

    def rotate(self, query: Tensor, key: Tensor, carried: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """Rotate query and key: [S, B, H, D], or [T, 1, H, D] when packed."""
        cos_sin, positions = self._arguments(carried, call)
        packed = call.cu_seqlens is not None or call.positions is not None
        q, k = (query.squeeze(1), key.squeeze(1)) if packed else (query, key)
        q, k = rope(q, k, cos_sin, positions, style=self.style)
        return (q.unsqueeze(1), k.unsqueeze(1)) if packed else (q, k)

    def unfused(self, carried: Tensor, call: _Call) -> Tensor:
        """Return `carried` in the form that Megatron's own apply function takes."""
        angles = carried if carried.is_floating_point() else self._angles(carried)
        # Megatron slices packed angles for its ranks itself, and its plain rotary class slices the others.
        is_full = call.size > 1 and angles.shape[0] == call.size * call.tokens
        return _rank_values(angles, call) if self.is_multimodal and call.cu_seqlens is None and is_full else angles

    def _arguments(self, carried: Tensor, call: _Call) -> _RotaryArguments:
        """Return the operator's arguments, computed once for all layers that get the same tensors.

        Nothing is cached while a graph is captured or traced, because a replay must compute them again.
        """
        if call.positions is not None or _is_recording(carried, call.cu_seqlens):
            return self._prepare(carried, call)
        cu_seqlens, last = call.cu_seqlens, self._last
        key = (call, carried._version, -1 if cu_seqlens is None else cu_seqlens._version)  # versions count writes
        if last is None or last[0] is not carried or last[1] is not cu_seqlens or last[2] != key:
            last = self._last = (carried, cu_seqlens, key, self._prepare(carried, call))
        return last[3]

    def _prepare(self, carried: Tensor, call: _Call) -> _RotaryArguments:
        if not self.is_multimodal:
            return self._prepare_plain(carried, call)
        local = _rank_values(_step_values(carried, call), call).squeeze(2)  # [S, B or 1, R or 3]
        if local.shape[1] != call.batch:
            local = local.expand(-1, call.batch, -1)
        local = local.squeeze(1) if call.cu_seqlens is not None else local
        if not carried.is_floating_point():
            table, positions = self._table(local.device, call.dtype), local.movedim(-1, 0).contiguous()
            return merge_mrope(table, positions, self.sections, self.layout), None
        return self._cos_sin(local, call), None

    def _prepare_plain(self, angles: Tensor, call: _Call) -> _RotaryArguments:
        """Return the arguments of plain rope.

        The angles of positions 0, 1, ... are a table; packed sequences all start at its first row.
        """
        if call.positions is not None:
            return self._cos_sin(angles.flatten(1), call), call.positions.to(angles.device)
        table = self._cos_sin(_step_values(angles, call).flatten(1), call)  # [P, R]
        if call.cu_seqlens is not None:
            positions = packed_positions(call.cu_seqlens)
            positions = context_slice(positions, call.rank, call.size, dim=0, cu_seqlens=call.cu_seqlens)
            return table, positions.to(table.device)
        if table.shape[0] != call.tokens:
            raise ValueError(
                f"megatron: {table.shape[0]} rotary positions, expected {call.tokens}, the tokens on this rank."
            )
        positions = torch.arange(call.tokens, device=table.device)[:, None].expand(-1, call.batch)
        return table, positions.contiguous()

    def _cos_sin(self, angles: Tensor, call: _Call) -> Tensor:
        """Return rows of cos and sin for this call, in the dtype that its device needs."""
        return (self._rows(angles) * call.mscale).to(table_dtype(angles.device, call.dtype))

    def _rows(self, angles: Tensor) -> Tensor:
        """Return [cos | sin] of Megatron's full-width angles, which have every angle twice."""
        half = angles[..., ::2] if self.style == "pairs" else angles[..., : angles.shape[-1] // 2]
        half = half.float()
        return torch.cat((half.cos(), half.sin()), -1)

    def _angles(self, positions: Tensor) -> Tensor:
        """Return full-width fp32 angles [N, B, 1, R] of positions [N, B, 1, 3], each channel by its axis."""
        axes = torch.tensor(mrope_axes(self.sections, self.layout), device=positions.device)
        return self._widen(positions.float()[..., axes])

    def _widen(self, positions: Tensor) -> Tensor:
        """Return the angles of fp32 positions [..., R/2 or 1] in Megatron's full width R, every angle twice."""
        if self._stretch is not None:
            positions = positions * (1 / self._stretch)
        half = positions * self._inv_freq.to(positions.device)
        return half.repeat_interleave(2, -1) if self.style == "pairs" else torch.cat((half, half), -1)

    def _table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the table [max_position, R], cached per device in the dtype that the device needs for q of `dtype`."""
        key = (device, table_dtype(device, dtype))
        if key not in self._tables:
            assert self.max_position is not None
            with torch.inference_mode(False):  # a tensor created in inference mode cannot be saved for backward
                positions = torch.arange(self.max_position, device=device, dtype=torch.float32)[:, None]
                self._tables[key] = self._rows(self._widen(positions)).to(key[1])
        return self._tables[key]


class _Site:
    """The two methods of one self-attention that are replaced: its forward, and `_SITE`, where q and k are rotated."""

    def __init__(self, attention: Any, embedding: _RotaryEmbedding) -> None:
        self._attention = attention
        self._embedding = embedding
        self._forward = attention.forward
        self._adjust = getattr(attention, _SITE)
        self._packed_index = list(inspect.signature(attention.forward).parameters).index("packed_seq_params")
        self._packed: Any = None
        self._rotated: list[weakref.ref[Any]] = []  # static contexts whose keys were rotated before caching
        concentration = import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
        self._mscale = concentration._yarn_get_concentration_factor_from_config(attention.config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Remember the packed_seq_params of the call, which `adjust` does not get, and run the attention's forward."""
        is_positional = len(args) > self._packed_index
        self._packed = args[self._packed_index] if is_positional else kwargs.get("packed_seq_params")
        return self._forward(*args, **kwargs)

    def adjust(
        self, inference_context: Any, query: Tensor, key: Tensor, value: Tensor, carried: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Rotate q and k and pass no rotary embedding on, or pass it on in the format with which Megatron rotates.

        carried: the pair (for q, for k) that Megatron passes as rotary_pos_emb, or None.
        """
        if carried is None:
            return self._adjust(inference_context, query, key, value, None, *args, **kwargs)
        calls = self._embedding.installation.calls
        context = inference_context if inference_context is not None else kwargs.get("inference_params")
        reason = self._reason(context, query, carried)
        if reason is None:
            query, key = self._embedding.rotate(query, key, carried[0], self._call(query, context))
            calls[self._embedding.operator] += 1
            return self._adjust(inference_context, query, key, value, None, *args, **kwargs)
        query, key, value, carried, *other_results = self._adjust(
            inference_context, query, key, value, carried, *args, **kwargs
        )
        # q and k differ in length when a cache is filled, so `carried` is converted for each of them.
        pairs = zip(carried, (query, key), strict=True)
        carried = tuple(None if c is None else self._embedding.unfused(c, self._call(t)) for c, t in pairs)
        calls[f"megatron: {reason}"] += 1
        return query, key, value, carried, *other_results

    def _reason(self, context: Any, query: Tensor, carried: tuple[Tensor | None, Tensor | None]) -> str | None:
        """Return why Megatron's own code rotates, or None."""
        reason = None
        if not self._embedding.installation.enabled:
            reason = "switched off"
        elif carried[0] is None or carried[0] is not carried[1]:
            reason = "q and k have different embeddings"
        elif self._embedding.operator == "mrope" and self._mscale != 1.0:
            reason = "attention factor with operator 'mrope'"
        if context is None:
            return reason
        return (
            self._static_reason(context, reason)
            if context.is_static_batching()
            else self._dynamic_reason(context, query, reason)
        )

    def _static_reason(self, context: Any, reason: str | None) -> str | None:
        """Return why Megatron rotates with a static context, or None.

        The first tokens of a sequence decide for the others, because cached keys must be all rotated, or none of them.
        """
        if context.sequence_len_offset == 0 and context.batch_size_offset == 0:
            self._rotated = [
                reference for reference in self._rotated if reference() is not None and reference() is not context
            ]
            if reason is None:
                self._rotated.append(weakref.ref(context))
            return reason
        is_rotated = any(reference() is context for reference in self._rotated)
        return None if is_rotated else reason or "the cached keys are not rotated"

    def _dynamic_reason(self, context: Any, query: Tensor, reason: str | None) -> str | None:
        if self._embedding.is_multimodal:
            return reason or "a dynamic inference context has no positions of images"
        if context.use_flashinfer_fused_rope:
            return reason or "flashinfer rotates"
        return reason or (
            None if query.shape[0] == context.padded_active_token_count else "the query is padded differently"
        )

    def _call(self, x: Tensor, context: Any = None) -> _Call:
        """Describe the call for x, q or k [S, B, H, D]."""
        group = self._attention.pg_collection.cp
        packed = self._packed
        cu_seqlens = None
        if packed is not None and packed.qkv_format == "thd":
            cu_seqlens = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
        place: dict[str, Any] = {}
        if context is not None and context.is_static_batching():
            place = {"start": context.sequence_len_offset}
        elif context is not None:
            place = {"positions": context.token_to_pos_ids[: x.shape[0]]}
        return _Call(x.shape[0], x.shape[1], cu_seqlens, group.rank(), group.size(), self._mscale, x.dtype, **place)


def _step_values(carried: Tensor, call: _Call) -> Tensor:
    """Return the values of this step's tokens; with an inference context `carried` may be of the full sequence."""
    if call.start is None or carried.shape[0] < call.start + call.tokens or carried.shape[0] == call.tokens:
        return carried
    return carried[call.start : call.start + call.tokens]


def _rank_values(carried: Tensor, call: _Call) -> Tensor:
    """Return the values of this rank's tokens; `carried` may be of the full sequence or sliced already."""
    tokens = carried.shape[0]
    if tokens == call.tokens:
        return carried
    if tokens == call.size * call.tokens:
        return context_slice(carried, call.rank, call.size, dim=0, cu_seqlens=call.cu_seqlens)
    raise ValueError(
        f"megatron: positions of {tokens} tokens for {call.tokens} tokens on rank {call.rank} of {call.size}; "
        "expected those of this rank's tokens or of the full sequence."
    )


def _is_recording(*tensors: Tensor | None) -> bool:
    """Return whether a result must not be cached.

    That is so while work is captured or traced, and for inference tensors, whose writes torch does not count.
    """
    if torch.compiler.is_compiling() or any(x is not None and x.is_inference() for x in tensors):
        return True
    devices = {x.device.type for x in tensors if x is not None}
    capturing = (getattr(getattr(torch, device, None), "is_current_stream_capturing", None) for device in devices)
    return any(is_capturing is not None and is_capturing() for is_capturing in capturing)
