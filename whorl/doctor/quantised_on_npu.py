"""Which matmuls whorl runs on an NPU for a quantised checkpoint, and which matrices it unpacks for every product."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whorl.contracts import antiquant_grouped_matmul_limit, weight_quant_matmul_limit

NEVER_RUN = "torch_npu does not document where it rounds, and none of this has run on a device."
WIDE = 4096  # columns and rows where config.json has no hidden_size; limits are about groups, not about this size
LINEAR, EXPERTS, W8A8 = "npu_weight_quant_batchmatmul", "npu_grouped_matmul", "npu_quant_matmul"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How some weights are stored. group: columns per scale, 0 for a whole row."""

    weight_dtype: str
    group: int = 0
    symmetric: bool = True
    has_order: bool = False  # columns are in any group (g_idx)
    has_int8_activations: bool = False
    has_fp16_scales: bool = False  # in published checkpoints, whatever the model's dtype


def describe_on_npu(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Say what whorl runs on an NPU; config: quantization_config, text: the language model's config."""
    if config.get("quant_method") == "gguf":
        return "On an NPU a GGUF file is unpacked when it is loaded."
    has_experts = any(
        isinstance(text.get(key), int) for key in ("num_experts", "n_routed_experts", "num_local_experts")
    )
    sentences = [_describe(scheme, text, has_experts) for scheme in _schemes(config)]
    return " ".join(dict.fromkeys([*sentences, NEVER_RUN]))


def _describe(scheme: Scheme, text: Mapping[str, Any], has_experts: bool) -> str:
    if scheme.has_int8_activations:
        return f"On an NPU {W8A8} multiplies them" + (f", and {EXPERTS} those of experts." if has_experts else ".")
    linear, experts = _limits(scheme, text)
    parts = [
        _product("linear layers", LINEAR, linear),
        *([_product("experts", EXPERTS, experts)] if has_experts else []),
    ]
    warning = " Scales that are not exact in the model's dtype are unpacked, too: use float16."
    return f"On an NPU {'; '.join(parts)}." + (warning if scheme.has_fp16_scales and linear is None else "")


def _product(what: str, operator: str, limit: str | None) -> str:
    if limit is None:
        return f"{what} run {operator}"
    return f"{what} are unpacked for every product ({limit})"


def _limits(scheme: Scheme, text: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return why torch_npu refuses such linear layers and such experts, each None where it does not."""
    if scheme.has_order:
        return ("columns are in any order, g_idx",) * 2
    if scheme.weight_dtype == "float8":
        return ("torch_npu multiplies bf16 by int8 and int4, not by fp8",) * 2
    size = text.get("hidden_size") if isinstance(text.get("hidden_size"), int) else WIDE
    assert isinstance(size, int)
    names = {"dtype": "bfloat16", "weight_dtype": scheme.weight_dtype, "scale_dtype": "bfloat16"}
    group = 0 if scheme.group >= size else scheme.group
    return (
        weight_quant_matmul_limit(shape=(1, size), weight_shape=(size, size), group=group, **names),
        antiquant_grouped_matmul_limit(weight_shape=(2, size, size), group=group, symmetric=scheme.symmetric, **names),
    )


def _schemes(config: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yield how the weights of a checkpoint are stored; its quant_method is one that whorl knows."""
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit", 4))
    group = _group(config.get("group_size", config.get("q_group_size", 128)))
    if method == "fp8":
        yield Scheme(weight_dtype="float8")
    elif method == "awq":
        yield Scheme(weight_dtype="int4", group=group, symmetric=False, has_fp16_scales=True)
    elif method == "gptq":
        yield Scheme(
            weight_dtype="int8" if bits == 8 else "int4",
            group=group,
            symmetric=config.get("sym", True) is not False,
            has_order=config.get("desc_act") is True,
            has_fp16_scales=True,
        )
    else:
        groups = config.get("config_groups")
        for entry in groups.values() if isinstance(groups, Mapping) else ():
            if isinstance(entry, Mapping) and isinstance(entry.get("weights"), Mapping):
                yield _compressed(entry["weights"], bool(entry.get("input_activations")))


def _compressed(weights: Mapping[str, Any], has_activations: bool) -> Scheme:
    """Return the scheme of a config group of compressed-tensors."""
    if weights.get("type", "int") == "float":
        return Scheme(weight_dtype="float8")
    return Scheme(
        weight_dtype="int4" if weights.get("num_bits") == 4 else "int8",
        group=_group(weights.get("group_size")),
        symmetric=weights.get("symmetric", True) is not False,
        has_order=weights.get("actorder") in ("group", "dynamic"),
        has_int8_activations=has_activations,
    )


def _group(value: object) -> int:
    """Return the columns per scale of a setting that may be absent or -1: 0 for a whole row."""
    return max(value, 0) if isinstance(value, int) else 0
