"""Checks of quantised weights and KV caches: which matmul runs, what is unfused on an NPU, what is unsupported."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whorl.contracts import antiquant_grouped_matmul_limit, weight_quant_matmul_limit
from whorl.doctor.launch import EXPERTS, Launch
from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.rules import model_file, rule

NVFP4 = "4-bit floats in blocks of 16 columns (NVFP4), unpacked to the model's dtype; activations stay in that dtype"
# By quant_method: how whorl computes with such weights; compressed-tensors has several formats, which
# `_describe_matmul` tells apart. Tests check that these are the methods, formats and algorithms that
# `whorl.nn.weights` can read.
KNOWN = {
    "fp8": "FP8 values, unpacked to the model's dtype; activations stay in that dtype",
    "compressed-tensors": "",
    "awq": "4-bit groups, unpacked to the model's dtype",
    "gptq": "4- or 8-bit groups, unpacked to the model's dtype",
    "gguf": "blocks of a GGUF file, unpacked to the model's dtype",
    "mxfp4": "4-bit floats in blocks of 32 columns (MXFP4) in the experts, with the values of the model's dtype; "
    "activations stay in that dtype",
    "modelopt": NVFP4,
    "modelopt_fp4": NVFP4,
}
FP4 = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")  # of compressed-tensors
COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", *FP4)
MODELOPT = ("NVFP4", "W4A16_NVFP4")  # quant_algo
FP4_METHODS = ("mxfp4", "modelopt", "modelopt_fp4")
INT8 = "int8 activations times int8 weights, summed exactly as integers"
# Projections that whorl and vLLM store as one matrix.
MERGED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _quantisation_config(launch: Launch) -> dict[str, Any]:
    model = launch.inputs.model or {}
    config = model.get("quantization_config") or model.get("compression_config") or {}
    return config if isinstance(config, dict) else {}


def _config_groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of weights of compressed-tensors."""
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _compressed_formats(config: Mapping[str, Any]) -> set[str]:
    """Return the formats of compressed-tensors' groups."""
    return {str(group.get("format") or config.get("format")) for group in _config_groups(config)}


def _modelopt_algorithm(config: Mapping[str, Any]) -> object:
    """Return ModelOpt's quant_algo, which some of its versions nest."""
    inner = config.get("quantization")
    return (inner if isinstance(inner, Mapping) else config).get("quant_algo")


def _describe_matmul(config: dict[str, Any]) -> str | None:
    """Describe how whorl multiplies by such weights; None where whorl refuses them."""
    method = str(config.get("quant_method"))
    if method.startswith("modelopt") and _modelopt_algorithm(config) not in (*MODELOPT, None):
        return None
    if method != "compressed-tensors":
        return KNOWN.get(method)
    groups, formats = _config_groups(config), _compressed_formats(config)
    if not formats or not formats <= {*COMPRESSED}:
        return None
    weights = [group.get("weights") for group in groups]
    types = {scheme.get("type", "int") for scheme in weights if isinstance(scheme, dict)}
    if any(group.get("input_activations") for group in groups) and types == {"int"}:
        return INT8
    return "values unpacked to the model's dtype; activations stay in that dtype"


@rule("quantised-product", "note", at=model_file)
def which_matmul(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    config = _quantisation_config(launch)
    matmul = _describe_matmul(config) if config else None
    if matmul is None:
        return
    rounded = "Activations are rounded to int8 with one scale per token, so results differ from those in 16 bits."
    equal = "The matmul gives the result of the unpacked weights; only memory and speed differ."
    on_npu = f" {_describe_on_npu(config, launch.text or {})}" if launch.device == "npu" else ""
    yield Finding(
        found=f"weights are quantised: {config.get('quant_method')}",
        expected=f"whorl's matmul: {matmul}",
        why=(rounded if matmul == INT8 else equal) + on_npu,
        fix="nothing to do; docs/quantization.md says how each format is stored",
    )


@rule("quantised-unknown", "warning", at=model_file)
def unknown_format(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    config = _quantisation_config(launch)
    if config and _describe_matmul(config) is None:
        kind = config.get("format") or _modelopt_algorithm(config)
        stored_as = f", {kind}" if kind else ""
        yield Finding(
            found=f"quant_method {config.get('quant_method')}{stored_as}",
            expected=f"one of {', '.join(KNOWN)}, in a format of docs/quantization.md",
            why="whorl refuses weights in a format that it does not know.",
            fix="use the unquantised checkpoint, or quantise it with whorl quantize",
        )


@rule("quantised-training", at=model_file)
def training_quantised_weights(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    if launch.train and _quantisation_config(launch):
        yield Finding(
            found=f"a checkpoint quantised by {_quantisation_config(launch).get('quant_method')}, to be trained",
            expected="weights in bf16, fp16 or fp32",
            why="Rounded weights have no gradient, and an optimizer step is smaller than the distance between two "
            "codes.",
            fix="train the unquantised checkpoint, then quantise the result",
        )


@rule("quantised-in-part", at=model_file)
def merged_matrix_quantised_in_part(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    """Report a merged matrix of which only some projections are listed as not quantised."""
    config = _quantisation_config(launch)
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        entries = config.get(key)
        names = {name for name in entries if isinstance(name, str)} if isinstance(entries, list) else set()
        parents = sorted({name.rpartition(".")[0] for name in names} - {""})
        for parent, projections in [(parent, group) for parent in parents for group in MERGED_PROJECTIONS]:
            missing = [name for name in projections if f"{parent}.{name}" not in names]
            if missing and len(missing) < len(projections):
                yield Finding(
                    found=f"{key} lists only some projections of {parent}; missing: {', '.join(missing)}",
                    expected=f"all of {', '.join(projections)}, or none",
                    why="whorl and vLLM store these projections as one matrix, and a matrix has one format.",
                    fix=f"quantise the model again, with all of them in {key}",
                )


# By kv_cache_dtype: what attention runs on an NPU, and why it is slow.
CACHES = {
    "int8": "int8 decodes with npu_fused_infer_attention_score in bf16; prefill runs the slow torch reference",
    "fp8": "torch_npu has no attention over fp8 with a scale per token and head, so the slow torch reference runs",
}
SCALE_BYTES = 4  # one scale beside the codes of a token and head


@rule("quantised-cache", at="kv_cache_dtype")
def unknown_cache(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    kind = launch.get("kv_cache_dtype", "auto")
    if launch.framework == "whorl" and kind not in ("auto", *CACHES):
        yield Finding(
            found=f"kv_cache_dtype {kind}",
            expected=f"auto, {' or '.join(CACHES)}",
            why="whorl stores keys and values in the model's dtype, or in 8 bits with a scale for each token and head.",
        )


@rule("quantised-cache", "note", at="kv_cache_dtype")
def which_cache(launch: Launch, path: RotaryPath) -> Iterator[Finding]:
    """Report the bytes per token of whorl's KV cache, and warn where its attention is slow."""
    kind, is_slow = str(launch.get("kv_cache_dtype")), launch.device == "npu"
    if launch.framework == "whorl" and kind in CACHES:
        yield Finding(
            found=f"the KV cache is stored in {kind}{_cache_bytes(launch.text or {})}",
            expected="results that are rounded a little more; docs/quantization.md has the measured errors",
            why=CACHES[kind]
            if is_slow
            else "Attention reads the codes, also of the prompt's own keys, so no bit depends on chunks.",
            fix="leave kv_cache_dtype out" if is_slow else "nothing to do",
            severity="warning" if is_slow else "note",
        )


def _cache_bytes(model: Mapping[str, Any]) -> str:
    """Say how many bytes a token takes in all layers, in 8 and in 16 bits; empty where config.json lacks the sizes."""
    layers, heads = model.get("num_hidden_layers"), model.get("num_attention_heads")
    width, kv_heads, dim = model.get("hidden_size"), model.get("num_key_value_heads", heads), model.get("head_dim")
    if dim is None and isinstance(width, int) and isinstance(heads, int) and heads:
        dim = width // heads
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(dim, int)):
        return ""
    coded, plain = (2 * layers * kv_heads * size / 1e3 for size in (dim + SCALE_BYTES, 2 * dim))
    return f": {coded:.1f} kB per token, {plain:.1f} kB in 16 bits"


# Which matmuls whorl runs on an NPU, and which matrices it unpacks for every product.

WIDE = 4096  # columns and rows where config.json has no hidden_size; limits are about groups, not about this size
LINEAR, GROUPED, W8A8 = "npu_weight_quant_batchmatmul", "npu_grouped_matmul", "npu_quant_matmul"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How some weights are stored. group: columns per scale, 0 for a whole row."""

    weight_dtype: str
    group: int = 0
    symmetric: bool = True
    has_order: bool = False  # columns are in any group (g_idx)
    has_int8_activations: bool = False
    has_fp16_scales: bool = False  # in published checkpoints, whatever the model's dtype


def _describe_on_npu(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Say what whorl runs on an NPU; config: quantization_config, text: the language model's config."""
    if config.get("quant_method") == "gguf":
        return "On an NPU a GGUF file is unpacked when it is loaded."
    if str(config.get("quant_method")) in FP4_METHODS or _compressed_formats(config) & {*FP4}:
        return "On an NPU 4-bit floats are unpacked when they are loaded: no operator of torch_npu reads them."
    has_experts = any(isinstance(text.get(key), int) for key in EXPERTS)
    sentences = [_describe(scheme, text, has_experts) for scheme in _schemes(config)]
    never_run = "torch_npu does not document where it rounds, and none of this has run on a device."
    return " ".join(dict.fromkeys([*sentences, never_run]))


def _describe(scheme: Scheme, text: Mapping[str, Any], has_experts: bool) -> str:
    if scheme.has_int8_activations:
        return f"On an NPU {W8A8} multiplies them" + (f", and {GROUPED} those of experts." if has_experts else ".")
    linear, experts = _limits(scheme, text)
    parts = [("linear layers", LINEAR, linear), ("experts", GROUPED, experts)][: 1 + has_experts]
    products = [
        f"{what} run {operator}" if limit is None else f"{what} are unpacked for every product ({limit})"
        for what, operator, limit in parts
    ]
    warning = " Scales that are not exact in the model's dtype are unpacked, too: use float16."
    return f"On an NPU {'; '.join(products)}." + (warning if scheme.has_fp16_scales and linear is None else "")


def _limits(scheme: Scheme, text: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return why torch_npu refuses such linear layers and such experts, each None where it does not."""
    if scheme.has_order:
        return ("columns are in any order, g_idx",) * 2
    if scheme.weight_dtype == "float8":
        return ("torch_npu multiplies bf16 by int8 and int4, not by fp8",) * 2
    hidden = text.get("hidden_size")
    size = hidden if isinstance(hidden, int) else WIDE
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
        for entry in _config_groups(config):
            if isinstance(entry.get("weights"), Mapping):
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
