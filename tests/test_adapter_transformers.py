"""Models with our operators installed against the same models untouched: transformers is the oracle."""

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whorl import ops
from whorl.adapters.transformers import install
from whorl.models.llama import Llama

transformers = pytest.importorskip("transformers", minversion="5.17")

FAMILIES = ["llama", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"]
QK_NORM = FAMILIES[1:]
MORE = {"head_dim": 16, "rms_norm_eps": 1e-3, "pad_token_id": 0, "tie_word_embeddings": False}
SIZES = {name: value for name, value in Llama.tiny(**MORE).items() if name not in ("architectures", "model_type")}
# Every expert is chosen: a rounding error may not send a token elsewhere.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
IMAGE, VISION_START, VISION_END = 90, 91, 92
SECTIONS = [3, 3, 2]


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model whose parameters, norms included, are far from their usual starting values."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **(EXPERTS if family.endswith("moe") else {}), **changes}
    if "vl" in family:
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTIONS, "mrope_interleaved": True}
        tokens = {
            "image_token_id": IMAGE,
            "video_token_id": 93,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
        text = {"rope_parameters": rope, **sizes}
        kind = "Qwen3VLMoe" if family.endswith("moe") else "Qwen3VL"
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=VISION, **tokens)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    else:
        kind = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
        sizes = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, **sizes}
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else parameter.shape[-1] ** -0.5))
            if "norm" in name:
                parameter.add_(1)
    return model.eval()


def make_inputs(family: str, device: str = "cpu") -> dict[str, Tensor]:
    """Two sequences, the first left padded; for Qwen3-VL both with an image, so that the three axes differ."""
    torch.manual_seed(1)
    ids = torch.randint(1, 80, (2, 14))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    if "vl" not in family:
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    ids[:, 5] = VISION_START
    ids[:, 6:10] = IMAGE
    ids[:, 10] = VISION_END
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def run(model: Any, inputs: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False, **more).logits
    torch.manual_seed(2)
    (logits * torch.randn(logits.shape).to(logits)).sum().backward()
    named = ((n.removeprefix("_orig_mod."), p.grad) for n, p in model.named_parameters())
    gradients = {n: grad.clone() for n, grad in named if grad is not None}
    return {"logits": logits.detach().clone(), **gradients}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = (found[name] - want).abs().max() / want.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"


class Seen(TorchDispatchMode):
    """Counts our operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "whorl":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def expected_count(family: str, *, fused: bool = False) -> dict[str, int]:
    """Of two layers and a final norm."""
    rotation = "qk_norm_rope" if fused else "mrope" if "vl" in family else "rope"
    norms = 2 if fused or family == "llama" else 4
    return {rotation: 2, "rms_norm": 2 * norms + 1, "swiglu": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_untouched_models(family: str, device: str) -> None:
    model, inputs = build(family).to(device), make_inputs(family, device)
    expected = run(model, inputs)
    installation = install(model)
    # 1e-5: fp32 with other orders of operations, observed 2e-6.
    assert_close(run(model, inputs), expected, 1e-5)
    with Seen() as seen, torch.no_grad():
        model(**inputs)
    assert seen.count == expected_count(family)
    installation.uninstall()
    again = run(model, inputs)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", QK_NORM)
def test_fused_norm_and_rotation(family: str) -> None:
    model, inputs = build(family), make_inputs(family)
    expected = run(model, inputs)
    with install(model, qk_norm_rope=True):
        assert_close(run(model, inputs), expected, 1e-5)
        with Seen() as seen, torch.no_grad():
            model(**inputs)
        assert seen.count == expected_count(family, fused=True)


@pytest.mark.parametrize(("family", "fused"), [(f, False) for f in FAMILIES] + [(f, True) for f in QK_NORM])
def test_half_precision_is_at_most_twice_as_far_from_fp64(family: str, fused: bool) -> None:
    model, inputs = build(family), make_inputs(family)
    for parameter in model.parameters():  # buffers stay: .to(bfloat16) would round the frequencies of both
        parameter.data = parameter.data.bfloat16()
    theirs = run(model, inputs)
    with install(model, qk_norm_rope=fused):
        ours = run(model, inputs)
    assert ours["logits"].dtype == torch.bfloat16
    if family.endswith("moe"):
        model.set_experts_implementation("eager")  # torch has no grouped matmul in fp64
    gold = run(model.double(), inputs)
    for group in ("logits", "norm", "self_attn", "mlp", "embed_tokens", "lm_head"):
        error, allowed = (distance(x, gold, group) for x in (ours, theirs))
        assert 0 < error <= 2 * allowed, f"{group}: {error:.2e} from fp64, transformers {allowed:.2e}"


def distance(found: dict[str, Tensor], gold: dict[str, Tensor], group: str) -> float:
    """Relative to gold, over all tensors of a kind: one small tensor alone is a matter of luck."""
    names = [n for n in gold if group in n and "visual" not in n]
    parts = [((found[n].double() - gold[n]).norm() / gold[n].norm()) ** 2 for n in names]
    return float(torch.stack(parts).mean().sqrt())


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("qwen3", False),
        ("qwen3_vl", True),
        *(pytest.param(f, False, marks=pytest.mark.slow) for f in FAMILIES if f != "qwen3"),
        *(pytest.param(f, True, marks=pytest.mark.slow) for f in QK_NORM if f != "qwen3_vl"),
    ],
)
def test_compiled_as_one_graph(family: str, fused: bool) -> None:
    model = build(family)
    inputs = {name: value for name, value in make_inputs("qwen3").items() if name != "attention_mask"}
    if "vl" in family:  # the vision tower splits by values, so transformers' own model breaks there
        inputs["position_ids"] = torch.randint(0, 50, (3, 2, 14))
    if family.endswith("moe"):  # the backward of transformers' grouped matmul reads values in fp32
        model.set_experts_implementation("batched_mm")
    expected = run(model, inputs)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)  # the backward is compiled too

    with install(model, qk_norm_rope=fused):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert_close(run(compiled, inputs), expected, 1e-5)
    nodes = Counter(
        op.name for graph in graphs for node in graph.graph.nodes for op in ops.OPS.values() if op.matches(node)
    )
    assert len(graphs) == 1
    assert nodes == expected_count(family, fused=fused)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, inputs = build("qwen3_vl"), make_inputs("qwen3_vl")
    expected = run(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    with install(model), Seen() as seen:
        assert_close(run(model, inputs), expected, 1e-5)
    assert seen.count["mrope"] == 4  # forward, and again in the backward
    assert seen.count["mrope_backward"] == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_vl"])
def test_generates_the_same_tokens(family: str, cache: str, device: str) -> None:
    model, inputs = build(family).to(device), make_inputs(family, device)
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected = model.generate(**inputs, **how)
    assert expected.shape[1] == 14 + 8
    with install(model), Seen() as seen:
        assert torch.equal(model.generate(**inputs, **how), expected)
    assert seen.count == {name: 8 * n for name, n in expected_count(family).items()}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8},
        {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_frequencies_come_from_the_models_own_rotary_module(rope: dict[str, Any]) -> None:
    model = build("qwen3", rope_parameters=rope, max_position_embeddings=32 if rope["rope_type"] == "yarn" else 8)
    short, long = torch.randint(1, 80, (2, 5)), torch.randint(1, 80, (2, 20))
    expected = [model(ids).logits for ids in (short, long, short)]
    with install(model):
        found = [model(ids).logits for ids in (short, long, short)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_positions_given_once_for_all_sequences() -> None:
    for family, shape in (("qwen3", (1, 6)), ("qwen3_vl", (3, 1, 6))):
        # Counting, since transformers takes a jump for the start of another sequence.
        model, positions = build(family), torch.arange(11, 17).expand(shape)
        inputs = {"input_ids": torch.randint(1, 80, (2, 6)), "position_ids": positions}
        expected = run(model, inputs)
        with install(model):
            assert_close(run(model, inputs), expected, 1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_attention_is_asked_as_before(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sliding window, dropout in training, and an argument of the caller's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "attention_dropout": 0.25}
    model, inputs = build("qwen3", **window).train(), make_inputs("qwen3")
    sdpa, asked = FUNCTIONS["sdpa"], []

    def recording(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        plain = {n: x.tolist() if isinstance(x, Tensor) else x for n, x in kwargs.items()}
        asked.append((module.layer_idx, q.shape, q.stride(), k.shape, v.shape, mask is None, plain))
        return sdpa(module, q, k, v, mask, **kwargs)

    monkeypatch.setitem(FUNCTIONS, "sdpa", recording)
    model(**inputs, use_cache=False, is_causal=True)
    with install(model, qk_norm_rope=fused):
        model(**inputs, use_cache=False, is_causal=True)
    assert [call[-1]["sliding_window"] for call in asked] == [None, 4, None, 4]
    assert asked[2:] == asked[:2]


def test_autocast_keeps_dtypes() -> None:
    """bf16 projections meet fp32 norm weights there."""
    model, inputs = build("qwen3"), make_inputs("qwen3")
    norms = [module for name, module in model.named_modules() if "norm" in name]
    dtypes: list[torch.dtype] = []
    for norm in norms:
        norm.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        theirs = model(**inputs).logits
        with install(model):
            ours = model(**inputs).logits
    assert ours.dtype == theirs.dtype
    assert len(dtypes) == 2 * len(norms)
    assert dtypes[len(norms) :] == dtypes[: len(norms)]
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()  # observed 0.009; bf16 rounds by 0.004


def test_outputs_are_recorded_as_before() -> None:
    model, inputs = build("qwen3", attn_implementation="eager"), make_inputs("qwen3")
    expected = model(**inputs, output_attentions=True, output_hidden_states=True)
    with install(model):
        found = model(**inputs, output_attentions=True, output_hidden_states=True)
    for name in ("attentions", "hidden_states"):
        assert len(found[name]) == len(expected[name]) > 0
        for ours, theirs in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_heads_are_handed_over_as_views(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    projected, rotated = [], []
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(lambda module, args, out: projected.append(out.data_ptr()))

    class Recording:
        def __call__(self, q: Tensor, k: Tensor, cos_sin: Tensor) -> Any:
            rotated.extend([q.data_ptr(), k.data_ptr()])
            assert q.shape == (2, 7, 4, 16)
            return original(q, k, cos_sin)

    original = ops.rope
    with install(model, norm=False, swiglu=False), torch.no_grad():
        for layer in model.model.layers:  # nothing between projection and rotation
            layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
        monkeypatch.setattr(ops, "rope", Recording())
        model(torch.randint(1, 80, (2, 7)))
    assert rotated == projected


def test_uninstall_leaves_no_trace() -> None:
    model, other = build("qwen3_vl_moe"), build("qwen3_vl_moe", seed=5)
    inputs = make_inputs("qwen3_vl_moe")
    before = {path: _attributes(module) for path, module in model.named_modules()}
    methods = {type(m): dict(vars(type(m))) for m in model.modules()}
    state, logits, other_logits = model.state_dict().keys(), model(**inputs).logits, other(**inputs).logits
    installation = install(model)
    assert model.state_dict().keys() == state
    assert torch.equal(other(**inputs).logits, other_logits)
    # Equal bits would not show whether our operators run, so each is made to refuse.
    for op in (ops.mrope, ops.rms_norm, ops.swiglu):
        with op.using("none"), pytest.raises(RuntimeError, match=f"{op.name}: backend 'none' was requested"):
            model(**inputs)
    torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-4, atol=1e-5)
    replaced = [(entry.owner, entry.name) for entry in installation.replaced]
    assert all(name in vars(owner) for owner, name in replaced)
    for kind, attributes in methods.items():
        assert all(vars(kind)[name] is value for name, value in attributes.items()), kind
    installation.uninstall()
    for path, module in model.named_modules():
        assert _attributes(module) == before[path], path
    with ops.mrope.using("none"), ops.rms_norm.using("none"), ops.swiglu.using("none"):
        assert torch.equal(model(**inputs).logits, logits)
    assert installation.replaced == ()


def _attributes(module: nn.Module) -> dict[str, int]:
    """Identities, but for what every forward of Qwen3-VL writes."""
    return {name: id(value) for name, value in vars(module).items() if name != "rope_deltas"}


def test_what_was_replaced_is_listed() -> None:
    model = build("qwen3_vl")
    installation = install(model, norm=False)
    paths = {(entry.path, entry.name) for entry in installation.replaced}
    text = "model.language_model"
    assert paths == {(f"{text}.rotary_emb", "forward")} | {
        (f"{text}.layers.{i}.{part}", "forward") for i in range(2) for part in ("self_attn", "mlp")
    }
    assert [kept.path for kept in installation.kept] == ["model.visual"]
    table = str(installation)
    assert f"2 x {text}.layers.*.self_attn.forward" in table
    assert "whorl.ops.mrope" in table
    assert "kept: the vision tower" in table
    assert all(entry.path in str(entry) and entry.why in str(entry) for entry in installation.replaced)


def test_eager_experts_are_said_to_be_kept() -> None:
    model, inputs = build("qwen3_moe", experts_implementation="eager"), make_inputs("qwen3_moe")
    expected = run(model, inputs)
    installation = install(model)
    assert [kept.path for kept in installation.kept] == [f"model.layers.{i}.mlp.experts.forward" for i in range(2)]
    assert_close(run(model, inputs), expected, 1e-5)
    model.set_experts_implementation("grouped_mm")
    with Seen() as seen, torch.no_grad():
        model(**inputs)
    assert seen.count["swiglu"] == 2


def test_a_deep_copy_uses_its_own_weights() -> None:
    model, inputs = build("qwen3"), make_inputs("qwen3")
    install(model)
    twin = copy.deepcopy(model)
    expected = twin(**inputs).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(**inputs).logits, expected)


def test_interpreted_triton_runs() -> None:
    model, inputs = build("qwen3", num_hidden_layers=1), {"input_ids": torch.randint(1, 80, (1, 5))}
    expected = run(model, inputs)
    ran: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**values: Any) -> Any:
            ran[name] += 1
            return function(**values)

        return call

    names = ("rope", "rope_backward", "rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward")
    with pytest.MonkeyPatch.context() as patch, install(model):
        for name in names:
            impl = ops.OPS[name].impls["triton"]
            patched = type(impl)(impl.backend, counted(name, impl.function), impl.accepts)
            patch.setitem(ops.OPS[name].impls, "triton", patched)
        with ops.rope.using("triton"), ops.rms_norm.using("triton"), ops.swiglu.using("triton"):
            found = run(model, inputs)
    assert_close(found, expected, 1e-5)
    assert ran == {
        "rope": 1,
        "rope_backward": 1,
        "rms_norm": 5,
        "rms_norm_backward": 5,
        "swiglu": 1,
        "swiglu_backward": 1,
    }


# ---- refusals


def test_an_unknown_model_is_told_what_was_looked_for() -> None:
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=8))
    with pytest.raises(ValueError, match=r"no module of BertModel is known.*qwen3_vl.*found.*BertSelfAttention"):
        install(model)


def test_a_subclass_with_its_own_forward_is_not_ours_to_replace() -> None:
    model = build("qwen3")
    kind = type(model.model.norm)
    model.model.norm.__class__ = type("Scaled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    installation = install(model)
    assert "model.norm" not in {entry.path for entry in installation.replaced}


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("qwen3", {"rope": False, "norm": False, "swiglu": False}, "all options are False"),
        ("llama", {"qk_norm_rope": True}, r"LlamaAttention.forward differs in \['k_norm', 'q_norm'\]"),
    ],
)
def test_what_cannot_be_given_is_refused(family: str, asked: dict[str, bool], message: str) -> None:
    model = build(family)
    with pytest.raises(ValueError, match=message):
        install(model, **asked)
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_activation_is_refused() -> None:
    model = build("llama", hidden_act="gelu")
    with pytest.raises(ValueError, match=r"needs a SiLU gate; found \['GELUActivation'\]. Pass swiglu=False"):
        install(model)
    assert not any("forward" in vars(module) for module in model.modules())
    install(model, swiglu=False)


def test_a_method_of_someone_else_is_not_dropped() -> None:
    model = build("qwen3")
    model.model.norm.forward = theirs = lambda x: x
    with pytest.raises(RuntimeError, match=r"model\.norm already has its own forward"):
        install(model)
    assert model.model.norm.forward is theirs
    assert "forward" not in vars(model.model.rotary_emb)


def test_a_second_installation_is_refused() -> None:
    model = build("qwen3")
    install(model, swiglu=False)
    with pytest.raises(RuntimeError, match="already has its own forward"):
        install(model, norm=False)
    assert "forward" not in vars(model.model.layers[0].mlp)
    install(model, rope=False, norm=False)


def test_cos_and_sin_of_transformers_are_refused() -> None:
    model = build("qwen3")
    cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 32), torch.arange(3)[None])
    install(model)
    with pytest.raises(ValueError, match="must come from this model's own rotary module"):
        model.model.layers[0](torch.randn(1, 3, 32), position_embeddings=(cos, sin))


def test_importing_it_imports_no_transformers() -> None:
    code = "import sys, whorl.adapters.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
