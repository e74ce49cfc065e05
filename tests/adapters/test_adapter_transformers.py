"""Models with our operators installed against the same models untouched: transformers is the oracle."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import (
    FAMILIES,
    QK_NORM,
    VISION_FAMILIES,
    build,
    make_inputs,
)

from whorl import ops
from whorl.adapters.transformers import install


def run(model: Any, inputs: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False, **more).logits
    torch.manual_seed(2)
    (logits * torch.randn(logits.shape).to(logits)).sum().backward()
    named = ((n.removeprefix("_orig_mod."), p.grad) for n, p in model.named_parameters())
    gradients = {n: grad.clone() for n, grad in named if grad is not None}
    return {"logits": logits.detach().clone(), **gradients}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] - want).abs().max() / want.abs().max()
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


# By family: rotations, norms and gates of two layers and a final norm, and norms of the tower. Of Qwen3.5's layers one
# has linear attention; experts have a shared expert beside them in Qwen3.5-MoE and, in one layer of two, in GLM-4.5V.
COUNTS = {
    "llama": (2, 5, 2, 0),
    "qwen2_vl": (2, 5, 2, 0),
    "qwen2_5_vl": (2, 5, 2, 5),
    "qwen3_5": (1, 7, 2, 0),
    "qwen3_5_moe": (1, 7, 4, 0),
    "glm4v": (2, 9, 2, 6),
    "glm4v_moe": (2, 5, 3, 6),
}


def expected_count(family: str, *, fused: bool = False, has_tower: bool = True) -> dict[str, int]:
    rotation = "qk_norm_rope" if fused else "rope"
    rotations, norms, gates, tower = COUNTS.get(family, (2, 5 if fused else 9, 2, 0))
    return {rotation: rotations, "rms_norm": norms + tower * has_tower, "glu": gates}


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


def distance(actual: dict[str, Tensor], gold: dict[str, Tensor], group: str) -> float:
    """Relative to gold, over all tensors of a kind: one small tensor alone is a matter of luck."""
    names = [n for n in gold if group in n and "visual" not in n]
    parts = [((actual[n].double() - gold[n]).norm() / gold[n].norm()) ** 2 for n in names]
    return float(torch.stack(parts).mean().sqrt())


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("qwen3_vl", True),
        # The backward of transformers' own Qwen3.5 does not compile.
        *(pytest.param(f, False, marks=pytest.mark.slow) for f in FAMILIES if not f.startswith("qwen3_5")),
        *(pytest.param(f, True, marks=pytest.mark.slow) for f in QK_NORM if f != "qwen3_vl"),
    ],
)
def test_compiled_as_one_graph(family: str, fused: bool) -> None:
    model = build(family)
    inputs = {name: value for name, value in make_inputs("qwen3").items() if name != "attention_mask"}
    if family in VISION_FAMILIES:  # the vision tower splits by values, so transformers' own model breaks there
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
    assert nodes == expected_count(family, fused=fused, has_tower=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, inputs = build("qwen3_vl"), make_inputs("qwen3_vl")
    expected = run(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    with install(model), Seen() as seen:
        assert_close(run(model, inputs), expected, 1e-5)
    assert seen.count["rope"] == 6  # forward, again in the backward, and in the gradient


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_vl", "qwen2_vl"])
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
        actual = [model(ids).logits for ids in (short, long, short)]
    for ours, theirs in zip(actual, expected, strict=True):
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
    sdpa, calls = FUNCTIONS["sdpa"], []

    def recording(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        plain = {n: x.tolist() if isinstance(x, Tensor) else x for n, x in kwargs.items()}
        calls.append((module.layer_idx, q.shape, q.stride(), k.shape, v.shape, mask is None, plain))
        return sdpa(module, q, k, v, mask, **kwargs)

    monkeypatch.setitem(FUNCTIONS, "sdpa", recording)
    model(**inputs, use_cache=False, is_causal=True)
    with install(model, qk_norm_rope=fused):
        model(**inputs, use_cache=False, is_causal=True)
    assert [call[-1]["sliding_window"] for call in calls] == [None, 4, None, 4]
    assert calls[2:] == calls[:2]


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
        actual = model(**inputs, output_attentions=True, output_hidden_states=True)
    for name in ("attentions", "hidden_states"):
        assert len(actual[name]) == len(expected[name]) > 0
        for ours, theirs in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_heads_are_handed_over_as_views(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    projected, rotated = [], []
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(lambda module, args, out: projected.append(out.data_ptr()))

    class Recording:
        def __call__(self, q: Tensor, k: Tensor, cos_sin: Tensor, *, style: str) -> Any:
            rotated.extend([q.data_ptr(), k.data_ptr()])
            assert q.shape == (2, 7, 4, 16)
            return original(q, k, cos_sin, style=style)

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
    for op in (ops.rope, ops.rms_norm, ops.glu):
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
    with ops.rope.using("none"), ops.rms_norm.using("none"), ops.glu.using("none"):
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
    assert "whorl.ops.rope" in table
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
    assert seen.count["glu"] == 2


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

    names = ("rope", "rms_norm", "rms_norm_backward", "glu", "glu_backward")
    with pytest.MonkeyPatch.context() as patch, install(model):
        for name in names:
            impl = ops.OPS[name].impls["triton"]
            patched = type(impl)(impl.backend, counted(name, impl.function), impl.accepts)
            patch.setitem(ops.OPS[name].impls, "triton", patched)
        with ops.rope.using("triton"), ops.rms_norm.using("triton"), ops.glu.using("triton"):
            actual = run(model, inputs)
    assert_close(actual, expected, 1e-5)
    assert ran == {
        "rope": 2,  # forward and gradient
        "rms_norm": 5,
        "rms_norm_backward": 5,
        "glu": 1,
        "glu_backward": 1,
    }
