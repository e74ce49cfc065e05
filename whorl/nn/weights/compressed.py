"""compressed-tensors checkpoints: their config groups say which modules are quantised, and how."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Format, Formats, Matrix, Part

from .dense import DENSE
from .fp4 import COMPRESSED
from .fp8 import Fp8, blocks
from .int8 import Int8
from .packed import BITS, Packed
from .quantised import ONE_EACH, Dim, names, narrow_scales, one_of, setting

PACKED, INTS, FLOATS, NAIVE, DENSE_NAME = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    "dense",
)
KNOWN = (PACKED, INTS, FLOATS, NAIVE, DENSE_NAME, *COMPRESSED)
# Ends of the names of KV cache scales, which a checkpoint may have and which are not used.
CACHE_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a compressed-tensors checkpoint of its `quantization_config`."""
    for name in ("sparsity_config", "transform_config"):
        section = settings.get(name)
        if section and not (isinstance(section, dict) and section.get("format") == DENSE_NAME):
            raise ValueError(f"quantization_config: {name} is {str(section)[:80]}; such weights are not supported")
    groups = setting(settings, dict, {}, "config_groups")
    by_target: dict[str, Format] = {}
    for group in groups.values():
        if not isinstance(group, dict):
            raise ValueError(f"quantization_config: config_groups has {str(group)[:60]}, expected objects")
        format = _format(group, settings.get("format"))
        by_target |= dict.fromkeys(names(group, "targets"), format)
    ignored = names(settings, "ignore")
    _check_patterns((*by_target, *ignored))
    order = sorted(by_target, key=lambda target: (_precedence(target), target))

    def of(name: str) -> Format:
        if any(_matches(name, target) for target in ignored):
            return DENSE
        return next((by_target[target] for target in order if _matches(name, target)), DENSE)

    units = [format.unit for format in by_target.values()] or [Unit()]
    unit = Unit(lcm(*(u.rows for u in units)), lcm(*(u.columns for u in units)))
    return Formats(of=of, unit=unit, ignored=CACHE_SCALES)


def _precedence(target: str) -> int:
    """Return the precedence of a target: names before patterns, patterns before classes."""
    return 2 if target in ("Linear", "Embedding") else int(target.startswith("re:"))


def _matches(name: str, target: str) -> bool:
    is_embedding = name.endswith("embed_tokens")
    if target in ("Linear", "Embedding"):
        return is_embedding == (target == "Embedding")
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def _check_patterns(targets: tuple[str, ...]) -> None:
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target[3:])
            except re.error as error:
                raise ValueError(f"quantization_config: {target!r} is not a regular expression: {error}") from error


def _format(group: Mapping[str, Any], default: Any) -> Format:
    weights, inputs = (setting(group, dict, None, name) for name in ("weights", "input_activations"))
    if weights is None:
        raise ValueError("quantization_config: a config group has no `weights`; only weights can be quantised")
    stored = group.get("format") or default
    if stored not in KNOWN:
        raise ValueError(f"quantization_config: format is {stored!r}, expected one of {', '.join(KNOWN)}")
    if stored == DENSE_NAME:
        return DENSE
    if stored in COMPRESSED:
        return _fp4(stored, weights)
    kind = one_of(weights, "type", ("int", "float"), "int")
    if stored == PACKED:
        one_of(weights, "type", ("int",), "int")
        return _packed(weights, inputs)
    if {INTS: "int", FLOATS: "float"}.get(stored, kind) != kind:
        raise ValueError(f"quantization_config: weights are of type {kind!r}, which format {stored!r} does not store")
    one_of(weights, "num_bits", (8,), 8)
    one_of(weights, "symmetric", (True,), True)
    return _int8(weights, inputs) if kind == "int" else _fp8(weights)


def _fp4(stored: str, weights: Mapping[str, Any]) -> Format:
    """Activations stay in the model's dtype, whatever the group says of them."""
    one_of(weights, "num_bits", (4,), 4)
    one_of(weights, "type", ("float",), "float")
    one_of(weights, "group_size", (COMPRESSED[stored].block,), COMPRESSED[stored].block)
    return COMPRESSED[stored]


def _packed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Format:
    if inputs is not None:
        raise ValueError("quantization_config: packed weights with quantised activations are not supported")
    strategy = one_of(weights, "strategy", ("group", "channel"), "group" if weights.get("group_size") else "channel")
    order = one_of(weights, "actorder", ("weight", "static", "group", "dynamic", False), False)
    group = setting(weights, int, None, "group_size") if strategy == "group" else None
    if strategy == "group" and (group is None or group < 1):
        raise ValueError(f"quantization_config: group_size is {group}, expected the columns of a group")
    return CompressedPacked(
        bits=one_of(weights, "num_bits", BITS, 8),
        group=group,
        has_act_order=order in ("group", "dynamic"),
        has_zeros=not setting(weights, bool, True, "symmetric"),
    )


def _int8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Format:
    strategy = one_of(weights, "strategy", ("channel", "tensor"), "tensor")
    if inputs is not None:
        one_of(inputs, "num_bits", (8,), 8)
        one_of(inputs, "type", ("int",), "int")
        one_of(inputs, "symmetric", (True,), True)
        one_of(inputs, "dynamic", (True,), False)
        one_of(inputs, "strategy", ("token",), "token")
    return Int8(kind="row" if strategy == "channel" else "matrix", is_weight_only=inputs is None)


def _fp8(weights: Mapping[str, Any]) -> Format:
    strategy = one_of(weights, "strategy", ("tensor", "channel", "block"), "tensor")
    if strategy == "block":
        size = weights.get("block_structure")
        size = [int(n) for n in size.split("x")] if isinstance(size, str) and re.fullmatch(r"\d+x\d+", size) else size
        return blocks(size, "weight_scale")
    return Fp8(end="weight_scale", kind="row" if strategy == "channel" else "matrix")


# ---- pack-quantized: weights are packed along K and zero points along N. Both are signed numbers, stored with
# 2^(bits - 1) added.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPacked(Packed):
    """pack-quantized weights: weight_packed int32 [N, ceil(K / 8)], weight_scale [N, groups], weight_shape.

    Asymmetric ones also have weight_zero_point int32 [ceil(N / 8), groups], those with act-order weight_g_idx [K].
    These are the shapes for 4 bits; with 8 bits a word has 4 numbers instead of 8.
    """

    has_zeros: bool

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        rows, columns = Packed.unit.fget(self)  # type: ignore[attr-defined]
        return Unit(rows=rows if self.has_zeros else 1, columns=columns)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        for part in matrix.entry_parts:
            self.check_size(matrix, part)
        lead, (rows, columns) = matrix.lead, matrix.shape[-2:]
        count, num_parts = self.num_rank_groups(matrix), self.part_starts(matrix, ONE_EACH)[1]
        parameters = {
            "words": torch.empty(*lead, rows, -(-columns // self.per_word), dtype=torch.int32),
            "scales": torch.empty(*lead, rows, count, dtype=torch.float32),
            "shapes": torch.empty(*lead, num_parts, 2, dtype=torch.int64),
        }
        if self.has_zeros:
            parameters["packed_zeros"] = torch.empty(
                *lead, self.part_starts(matrix, self.per_word)[1], count, dtype=torch.int32
            )
        if self.has_act_order:
            parameters["g_idx"] = torch.empty(*lead, num_parts, columns, dtype=torch.int32)
        return parameters

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        rows, words, groups = self.rows_of(matrix, part), self.columns_of(part, self.per_word), self.groups_of(part)
        yield "weight_packed", self.destination(matrix.words, part, rows, words, dtype=torch.int32)
        yield "weight_scale", self.destination(matrix.scales, part, rows, groups)
        shape = self.row_of(matrix, matrix.shapes, part)
        yield "weight_shape", self.destination(shape, part, Dim(2, slice(0, 2), slice(None)), dtype=torch.int64)
        if self.has_zeros:
            dims = self.rows_of(matrix, part, self.per_word), groups
            yield "weight_zero_point", self.destination(matrix.packed_zeros, part, *dims, dtype=torch.int32)
        if self.has_act_order:
            order = self.row_of(matrix, matrix.g_idx, part)
            yield "weight_g_idx", self.destination(order, part, self.columns_of(part), dtype=torch.int32)

    def finish(self, matrix: Any) -> None:
        for part, shape in zip(matrix.parts, matrix.shapes.flatten(0, -2).tolist(), strict=True):
            if tuple(shape) != part.shape:
                raise ValueError(
                    f"{part.source(matrix.name)}.weight_shape is {shape}, expected {list(part.shape)} by config.json"
                )
        zeros = None
        if self.has_zeros:
            zeros = self.unpacked_zeros(matrix, matrix.packed_zeros.mT).mT.clone(memory_format=torch.contiguous_format)
        scales, order = narrow_scales(matrix.scales.data), matrix.g_idx.data if self.has_act_order else None
        self.lay_out(matrix, matrix.words.data, scales, zeros, order)
