"""Checks of quantised weights and KV caches: which matmul runs, what is unfused on an NPU, what is unsupported."""

from collections.abc import Iterator, Mapping
from typing import Any

from whorl.doctor.launch import Launch
from whorl.doctor.quantised_on_npu import describe_on_npu
from whorl.doctor.report import RotaryPath
from whorl.doctor.rules import Problem, rule

# By quant_method: how whorl computes with such weights; compressed-tensors has several formats, which
# `_describe_matmul` tells apart. A test checks that these are the methods that `whorl.nn.weights` can read.
KNOWN = {
    "fp8": "FP8 values, unpacked to the model's dtype; activations stay in that dtype",
    "compressed-tensors": "",
    "awq": "4-bit groups, unpacked to the model's dtype",
    "gptq": "4- or 8-bit groups, unpacked to the model's dtype",
    "gguf": "blocks of a GGUF file, unpacked to the model's dtype",
}
INT8 = "int8 activations times int8 weights, summed exactly as integers"
# Projections that whorl and vLLM store as one matrix.
MERGED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _quantisation_config(launch: Launch) -> dict[str, Any]:
    model = launch.inputs.model or {}
    config = model.get("quantization_config") or model.get("compression_config") or {}
    return config if isinstance(config, dict) else {}


def _describe_matmul(config: dict[str, Any]) -> str | None:
    """Describe how whorl multiplies by such weights; None where whorl refuses them."""
    method = config.get("quant_method")
    if method != "compressed-tensors":
        return KNOWN.get(str(method))
    groups = config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    formats = {str(group.get("format") or config.get("format")) for group in groups}
    if not formats or not formats <= {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"}:
        return None
    weights = [group.get("weights") for group in groups]
    types = {scheme.get("type", "int") for scheme in weights if isinstance(scheme, dict)}
    if any(group.get("input_activations") for group in groups) and types == {"int"}:
        return INT8
    return "values unpacked to the model's dtype; activations stay in that dtype"


@rule("quantised-product", "note")
def which_matmul(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    config = _quantisation_config(launch)
    matmul = _describe_matmul(config) if config else None
    if matmul is None:
        return
    rounded = "Activations are rounded to int8 with one scale per token, so results differ from those in 16 bits."
    equal = "The matmul gives the result of the unpacked weights; only memory and speed differ."
    on_npu = [describe_on_npu(config, launch.text or {})] if launch.device == "npu" else []
    yield Problem(
        where=launch.inputs.model_where,
        found=f"weights are quantised: {config.get('quant_method')}",
        expected=f"whorl's matmul: {matmul}",
        why=" ".join((rounded if matmul == INT8 else equal, *on_npu)),
        fix="nothing to do; docs/quantization.md says how each format is stored",
    )


@rule("quantised-unknown", "warning")
def unknown_format(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    config = _quantisation_config(launch)
    if not config or _describe_matmul(config) is not None:
        return
    stored_as = f", {config['format']}" if config.get("format") else ""
    yield Problem(
        where=launch.inputs.model_where,
        found=f"quant_method {config.get('quant_method')}{stored_as}",
        expected=f"one of {', '.join(KNOWN)}, in a format of docs/quantization.md",
        why="whorl refuses weights in a format that it does not know.",
        fix="use the unquantised checkpoint, or quantise it with whorl quantize",
    )


@rule("quantised-training")
def training_quantised_weights(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    if not launch.train or not _quantisation_config(launch):
        return
    yield Problem(
        where=launch.inputs.model_where,
        found=f"a checkpoint quantised by {_quantisation_config(launch).get('quant_method')}, to be trained",
        expected="weights in bf16, fp16 or fp32",
        why="Rounded weights have no gradient, and an optimizer step is smaller than the distance between two codes.",
        fix="train the unquantised checkpoint, then quantise the result",
    )


@rule("quantised-in-part")
def merged_matrix_quantised_in_part(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    """Report a merged matrix of which only some projections are listed as not quantised."""
    config = _quantisation_config(launch)
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        entries = config.get(key)
        names = {name for name in entries if isinstance(name, str)} if isinstance(entries, list) else set()
        parents = sorted({name.rpartition(".")[0] for name in names} - {""})
        for parent, projections in [(parent, group) for parent in parents for group in MERGED_PROJECTIONS]:
            missing = [name for name in projections if f"{parent}.{name}" not in names]
            if missing and len(missing) < len(projections):
                yield Problem(
                    where=launch.inputs.model_where,
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


@rule("quantised-cache", "note")
def which_cache(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    """Report the bytes per token of whorl's KV cache, and warn where its attention is slow."""
    kind = launch.get("kv_cache_dtype", "auto")
    if launch.framework != "whorl" or kind == "auto":
        return
    if kind not in CACHES:
        yield Problem(
            setting="kv_cache_dtype",
            found=f"kv_cache_dtype {kind}",
            expected=f"auto, {' or '.join(CACHES)}",
            why="whorl stores keys and values in the model's dtype, or in 8 bits with a scale for each token and head.",
            severity="error",
        )
        return
    is_slow = launch.device == "npu"
    yield Problem(
        setting="kv_cache_dtype",
        found=f"the KV cache is stored in {kind}{_cache_bytes(launch.text or {})}",
        expected="results that are rounded a little more; docs/quantization.md has the measured errors",
        why=CACHES[kind]
        if is_slow
        else "Attention reads the codes, also of the prompt's own keys, so no bit depends on chunks.",
        fix="leave kv_cache_dtype out" if is_slow else "nothing to do",
        severity="warning" if is_slow else None,
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
