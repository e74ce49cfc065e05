"""Quantised weights and caches: what will run, what is not fused on an NPU, and what does not go together."""

from collections.abc import Iterator, Mapping
from typing import Any

from whorl.doctor.launch import Launch
from whorl.doctor.report import RotaryPath
from whorl.doctor.rules import Problem, rule

# By quant_method: what whorl makes of it. It has tests that this is what `whorl.nn.weights` knows.
KNOWN = {
    "fp8": "FP8 values, unpacked to the model's dtype; activations stay in it",
    "compressed-tensors": "",
    "awq": "4-bit groups, unpacked to the model's dtype",
    "gptq": "4- or 8-bit groups, unpacked to the model's dtype",
    "gguf": "blocks of a GGUF file, unpacked to the model's dtype",
}
INT8 = "int8 activations times int8 weights, exact sums of whole numbers"
# Projections that whorl and vLLM hold as one matrix.
ONE_MATRIX = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _settings(launch: Launch) -> dict[str, Any]:
    model = launch.inputs.model or {}
    found = model.get("quantization_config") or model.get("compression_config") or {}
    return found if isinstance(found, dict) else {}


def _product(settings: dict[str, Any]) -> str | None:
    """None: whorl refuses such weights."""
    method = settings.get("quant_method")
    if method != "compressed-tensors":
        return KNOWN.get(str(method))
    groups = settings.get("config_groups")
    groups = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    stored = {str(each.get("format") or settings.get("format")) for each in groups}
    if not stored or not stored <= {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"}:
        return None
    weights = [each.get("weights") for each in groups]
    kinds = {each.get("type", "int") for each in weights if isinstance(each, dict)}
    if any(each.get("input_activations") for each in groups) and kinds == {"int"}:
        return INT8
    return "values unpacked to the model's dtype; activations stay in it"


@rule("quantised-product", "note")
def which_product(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    settings = _settings(launch)
    product = _product(settings) if settings else None
    if product is None:
        return
    rounded = "Activations are rounded to int8, with a scale a token: results are not those of the weights' values."
    equal = "A product of quantised weights equals the plain one of their values; memory and speed differ."
    unfused = " There is no fused product of such weights on an NPU: every matrix is unpacked first."
    yield Problem(
        where=launch.inputs.model_where,
        found=f"weights are quantised: {settings.get('quant_method')}",
        expected=f"whorl's product: {product}",
        why=(rounded if product == INT8 else equal) + (unfused if launch.device == "npu" else ""),
        fix="nothing; docs/quantisation.md says what each format is held as",
    )


@rule("quantised-unknown", "warning")
def not_known(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    settings = _settings(launch)
    if not settings or _product(settings) is not None:
        return
    stored = f", {settings['format']}" if settings.get("format") else ""
    yield Problem(
        where=launch.inputs.model_where,
        found=f"quant_method {settings.get('quant_method')}{stored}",
        expected=f"one of {', '.join(KNOWN)}, in a layout of docs/quantisation.md",
        why="whorl refuses weights in a layout that it does not know; it does not guess.",
        fix="take the model as it was before, or whorl quantize it",
    )


@rule("quantised-training")
def trained(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    if not launch.train or not _settings(launch):
        return
    yield Problem(
        where=launch.inputs.model_where,
        found=f"a checkpoint quantised by {_settings(launch).get('quant_method')}, to be trained",
        expected="weights in bf16, fp16 or fp32",
        why="Rounded weights have no gradient, and a step is smaller than their distance.",
        fix="train the model as it was before, and quantise the result",
    )


@rule("quantised-in-part")
def half_of_a_matrix(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    """Of what is one matrix some projections are listed as not quantised, and others not."""
    settings = _settings(launch)
    for key in ("ignore", "modules_to_not_convert", "ignored_layers"):
        listed = settings.get(key)
        names = {each for each in listed if isinstance(each, str)} if isinstance(listed, list) else set()
        parents = sorted({name.rpartition(".")[0] for name in names} - {""})
        for parent, together in [(parent, group) for parent in parents for group in ONE_MATRIX]:
            lost = [each for each in together if f"{parent}.{each}" not in names]
            if lost and len(lost) < len(together):
                yield Problem(
                    where=launch.inputs.model_where,
                    found=f"{key} has of {parent} not {', '.join(lost)}",
                    expected=f"all of {', '.join(together)}, or none",
                    why="They are one matrix in whorl and in vLLM, which has one format.",
                    fix=f"quantise the model anew, with all of them in {key}",
                )


# By kv_cache_dtype: what an NPU runs of it.
CACHES = {
    "int8": "int8 decodes by npu_fused_infer_attention_score in bf16; prompts are the torch reference's, slowly",
    "fp8": "torch_npu has no attention over fp8 with a scale a token and head: all of it is the torch reference's",
}
SCALE = 4  # bytes beside the codes of a head


@rule("quantised-cache", "note")
def which_cache(launch: Launch, path: RotaryPath) -> Iterator[Problem]:
    """Of whorl's own engine: what a token takes, and, where it is slow, that it is."""
    kind = launch.get("kv_cache_dtype", "auto")
    if launch.framework != "whorl" or kind == "auto":
        return
    if kind not in CACHES:
        yield Problem(
            setting="kv_cache_dtype",
            found=f"kv_cache_dtype {kind}",
            expected=f"auto, {' or '.join(CACHES)}",
            why="whorl keeps keys and values in the model's dtype, or in 8 bits with a scale for each token and head.",
            severity="error",
        )
        return
    is_slow = launch.device == "npu"
    yield Problem(
        setting="kv_cache_dtype",
        found=f"the cache is kept in {kind}{_cache_bytes(launch.text or {})}",
        expected="results that are rounded a little more; docs/quantisation.md has figures",
        why=CACHES[kind] if is_slow else "Attention reads the codes, and a prompt its own: no bit depends on chunks.",
        fix="leave kv_cache_dtype out" if is_slow else "nothing",
        severity="warning" if is_slow else None,
    )


def _cache_bytes(model: Mapping[str, Any]) -> str:
    """What a token takes in all layers, coded and plain; nothing where config.json does not say."""
    layers, heads = model.get("num_hidden_layers"), model.get("num_attention_heads")
    width, kv_heads, dim = model.get("hidden_size"), model.get("num_key_value_heads", heads), model.get("head_dim")
    if dim is None and isinstance(width, int) and isinstance(heads, int) and heads:
        dim = width // heads
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(dim, int)):
        return ""
    coded, plain = (2 * layers * kv_heads * size / 1e3 for size in (dim + SCALE, 2 * dim))
    return f": {coded:.1f} kB a token, {plain:.1f} in 16 bits"
