"""torch.compile of a DeepSeek-V3.2: whole graphs with our operators as nodes, and a mode that generates no kernel."""

import collections
import re
from typing import Any

import pytest
import torch
from ranks import shared
from titan_layouts import BATCH, LENGTH, TIMEOUT, TOLERANCE, Degrees, batch, build, fuse, job
from torch import Tensor, nn

COPIES = ("clone", "copy", "contiguous", "_to_copy")


def _model(path: str, converters: tuple[str, ...] = ()) -> nn.Module:
    from whorl.titan.cpu import install

    install()
    config = job(Degrees())
    model = build(config)
    fuse(model, path)
    if converters:
        from whorl.titan.converters.table import CONVERTERS

        for name in converters:
            CONVERTERS[name](config, None).convert(model)
    return model


def _step(model: nn.Module) -> dict[str, Tensor]:
    """Loss and gradients of one sequence."""
    from torchtitan.components.loss import cross_entropy_loss

    tokens, labels = (t[:1] for t in batch())
    loss = cross_entropy_loss(model(tokens), labels) / (BATCH * LENGTH)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - value).abs().max() / value.abs().max()) for name, value in want.items())


def _capture(path: str, converters: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every graph that a step is made of, as counts of our operators, forward and backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import counters

    from whorl.titan.deepseek_v32.infra.compiled import compile_blocks

    graphs: dict[str, list[dict[str, int]]] = {"forward": [], "backward": []}

    def recorder(direction: str) -> Any:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            ours = [n.target for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "whorl"]
            graphs[direction].append(dict(collections.Counter(op._opname for op in ours)))
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    counters.clear()
    want = _step(_model(path, converters))
    model = _model(path, converters)
    compile_blocks(model, aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward")))
    worst = _worst(_step(model), want)
    compiled = [name for name, m in model.named_modules() if hasattr(m.forward, "_torchdynamo_orig_callable")]
    return {"graphs": graphs, "breaks": sum(counters["graph_break"].values()), "worst": worst, "compiled": compiled}


NODES = {
    "masked": (
        {"lightning_indexer": 1, "selection_mask": 1, "masked_attention": 1},
        {"masked_attention_backward": 1, "indexer_target": 1, "indexer_kl": 1},
    ),
    "absorbed": (
        {"lightning_indexer": 1, "sparse_attention": 1},
        {"sparse_attention_backward": 1, "indexer_kl_gradients": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["masked", "absorbed"])
def test_whole_graphs_with_our_operators_as_nodes(path: str) -> None:
    answer = shared(1).run(_capture, path, timeout=TIMEOUT)[0]
    assert answer["breaks"] == 0
    assert answer["worst"] < TOLERANCE
    forward, backward = answer["graphs"]["forward"], answer["graphs"]["backward"]
    # Norm, attention, feed-forward layer, router, shared expert: three layers of two kinds share them.
    assert len(forward) == len(backward) == 5
    assert [g for g in forward if g] == [NODES[path][0]]
    assert [g for g in backward if g] == [NODES[path][1]]
    moe = {name for name in answer["compiled"] if ".moe." in name}
    assert moe == {f"layers.{i}.moe.{part}" for i in (1, 2) for part in ("router", "shared_experts")}
    assert {f"layers.{i}.attention" for i in range(3)} < set(answer["compiled"])


@pytest.mark.slow
def test_fused_norms_and_rotation_are_nodes() -> None:
    answer = shared(1).run(_capture, "absorbed", ("whorl_rms_norm", "whorl_rope"), timeout=TIMEOUT)[0]
    assert answer["breaks"] == 0
    assert answer["worst"] < TOLERANCE
    forward = [g for g in answer["graphs"]["forward"] if g]
    # A block's own two norms share a graph; in the attention are those of both low-rank projections.
    assert {"rms_norm": 1} in forward
    assert NODES["absorbed"][0] | {"rms_norm": 2, "rope": 2} in forward


def _no_codegen() -> dict[str, Any]:
    """What Inductor writes, and how many copies the graphs that it was given ask for."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    from whorl.titan.deepseek_v32.infra import compiled

    requested: collections.Counter[str] = collections.Counter()

    class Recorder(compiled.KeepInBackward):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            names = [n.target._opname for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
            requested.update(name for name in names if name in COPIES)

    torch._dynamo.reset()
    want = _step(_model("absorbed"))
    model = _model("absorbed")
    plain, compiled.KeepInBackward = compiled.KeepInBackward, Recorder  # type: ignore[misc]
    try:
        compiled.compile_blocks(model, no_codegen=True)
    finally:
        compiled.KeepInBackward = plain  # type: ignore[misc]
    with fresh_cache():
        got, codes = run_and_get_code(lambda: _step(model))
    return {"worst": _worst(got, want), "codes": codes, "asked": dict(requested)}


@pytest.fixture(scope="module")
def without_kernels() -> dict[str, Any]:
    return shared(1).run(_no_codegen, timeout=TIMEOUT)[0]


@pytest.mark.slow
def test_no_kernel_is_generated(without_kernels: dict[str, Any]) -> None:
    answer = without_kernels
    assert answer["worst"] < TOLERANCE
    codes = answer["codes"]
    assert len(codes) == 10  # five graphs, both directions
    calls = []
    for code in codes:
        assert not re.search(r"async_compile\.\w+\(|cpp_fused|triton_\w+ =", code.replace("async_compile.wait(", ""))
        calls += re.findall(
            r"^ +(?:buf\d+ = )?(\w[\w.]*)\(", code[code.index("def call(") : code.index("return (")], re.M
        )
    kernels = {name for name in calls if name not in ("assert_size_stride", "assert_alignment", "args.clear")}
    assert kernels
    assert all(name.startswith("torch.ops.") for name in kernels), kernels
    written = collections.Counter(name.split(".")[3] for name in calls if name.startswith("torch.ops.aten."))
    added = {name: n for name in COPIES if (n := written[name] - answer["asked"].get(name, 0)) > 0}
    assert not added


@pytest.mark.slow
def test_the_indexers_loss_stays_in_backward(without_kernels: dict[str, Any]) -> None:
    codes = without_kernels["codes"]
    forward = next(code for code in codes if "whorl.lightning_indexer" in code)
    backward = next(code for code in codes if "whorl.sparse_attention_backward" in code)
    assert "whorl.indexer_kl" not in forward
    assert "whorl.indexer_kl" in backward


def _inductor() -> float:
    from torch._inductor.utils import fresh_cache

    from whorl.titan.deepseek_v32.infra.compiled import compile_blocks

    torch._dynamo.reset()
    want = _step(_model("absorbed"))
    model = _model("absorbed")
    compile_blocks(model)
    with fresh_cache():
        return _worst(_step(model), want)


@pytest.mark.slow
def test_generated_kernels_compute_the_same() -> None:
    assert shared(1).run(_inductor, timeout=600)[0] < TOLERANCE


def _refused() -> str:
    from whorl.titan.deepseek_v32.infra.compiled import compile_options

    with pytest.raises(ValueError, match="no_codegen") as caught:
        compile_options("aot_eager", no_codegen=True)
    return str(caught.value)


def test_no_codegen_is_inductors() -> None:
    assert "compile.backend is 'aot_eager', expected 'inductor'" in shared(1).run(_refused, timeout=TIMEOUT)[0]
