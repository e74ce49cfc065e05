"""The engine on Ascend: what it asks of the device, and that it generates there what it generates on the CPU.

npu/engine.py runs in a process of its own over the real torch_npu, see test_torch_npu.py. Tensors there say that they
are on npu:0 and mix with no others; plain-torch kernels stand behind the npu operators' real schemas and refuse what
the vendor documents that the device refuses; a graph that is recorded, or a copy that may read freed memory, fails.
"""

import os
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from mock_model import MockModel
from test_torch_npu import HERE, VERSION, build, find_wheel, live_environment, locked, require_tools, run_proof

from whorl import device
from whorl.contracts import Installed, call_arguments
from whorl.contracts.attention import PAGE_SIZES
from whorl.engine import memory
from whorl.engine.llm import LLM
from whorl.engine.speculate.draft_model import DraftModel
from whorl.ops import _torch_npu, availability

ENGINE = HERE / "npu" / "engine.py"
RUNS = ("gpt_oss:plain", "qwen3:lookup", "experts:w4a16", "vision:plain", "deepseek:plain")
MORE = ("llama:plain", "window:lookup", "experts:plain", "qwen3:draft_model", "qwen3:plain", "qwen3:crowded")
MORE += ("experts:draft_model", "window:plain", "window:crowded", "experts:w8a8", "qwen3:w4a16", "deepseek:crowded")
MORE += ("gpt_oss:crowded", "llama:crowded", "deepseek:mtp", "deepseek_v3:plain", "deepseek_v3:lookup")
MORE += ("qwen3_5:plain",)
DENSE = {"npu_linear", "npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_top_k_top_p"}
CACHE = {"npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"}
ROUTED = {"npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_finalize_routing"}
EXPERTS = {"npu_moe_gating_top_k_softmax"} | ROUTED
LATENT = {"npu_rotary_mul", "npu_scatter_nd_update_", "npu_transpose_batchmatmul", "npu_sparse_flash_attention"}
SINKS = {"npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score_v2", "npu_clipped_swiglu"}
CALLED = {
    "llama": DENSE | CACHE | {"npu_rotary_mul"},
    "qwen3": DENSE | CACHE | {"npu_mrope"},
    "window": DENSE | CACHE | {"npu_mrope"},
    "experts": DENSE | CACHE | EXPERTS | {"npu_mrope"},
    "gpt_oss": DENSE - {"npu_swiglu"} | EXPERTS | SINKS | {"npu_rotary_mul"},
    "deepseek": DENSE | LATENT | ROUTED | {"npu_moe_gating_top_k", "npu_lightning_indexer"},
    "deepseek_v3": DENSE | LATENT | ROUTED | {"npu_moe_gating_top_k"},
    # Norms of 1 + weight are not added to a residual there.
    "qwen3_5": DENSE - {"npu_add_rms_norm"} | CACHE | {"npu_mrope"},
    # In the tower heads have 72 channels, which npu_mrope does not take, and see the whole frame.
    "vision": DENSE | CACHE | {"npu_mrope", "npu_rotary_mul", "npu_fusion_attention"},
}
# torch_npu's operators of gated delta layers keep states in bf16, and its convolution has three taps: torch runs.
DELTA = {"causal_conv_lanes", "delta_gates", "gated_delta_lanes", "gated_delta_step", "gated_rms_norm", "l2_norm"}
FALLBACKS = {"qwen3_5": DELTA | {"output_gate"}}
# By kind of weights; experts call the grouped matmul whatever they are stored in, the router and the head npu_linear.
QUANTISED = {"w8a8": {"npu_quant_matmul", "npu_dynamic_quant"}, "w4a16": {"npu_weight_quant_batchmatmul"}}
# What runs where AscendC's batch-invariant operators are installed.
REPLACED = {
    "npu_linear": "npu_mm_batch_invariant",
    "npu_add_rms_norm": "npu_rms_norm",
    "npu_fused_infer_attention_score": "npu_fused_infer_attention_score_batch_invariant",
}
LOGPROBS = {"npu_log_softmax_batch_invariant"}
# Two arithmetics in bf16, in units of the logits' spread: observed up to 0.009. A mask that hides a query from itself
# gives 0.25, a window that is one key short 0.016.
ALLOWED = 0.0125


# ---- what the device says


def test_npu_launches_are_not_recorded() -> None:
    assert device.use_graphs("cuda", None)
    assert not device.use_graphs("npu", None)
    assert not device.use_graphs("cuda", False)
    with pytest.raises(ValueError, match="npu records no graphs: its attention takes the lengths"):
        device.use_graphs("npu", True)


def test_record_graph_does_not_run_what_it_cannot_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator", lambda _: object())
    assert device.record_graph("npu", lambda: pytest.fail("it ran")) is None
    assert device.graph_pool("npu") is None


def test_asking_for_graphs_where_there_are_none_is_refused() -> None:
    with pytest.raises(ValueError, match="use_graphs is True, but cpu records no graphs"):
        LLM(model=MockModel(), device="cpu", num_blocks=4, use_graphs=True)


def test_blocks_are_what_the_backends_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_installed", lambda _: True)
    assert device.block_size("npu") in PAGE_SIZES
    assert device.block_size("cuda") == device.block_size("cpu") == 16
    specs = MockModel().cache_specs()
    assert (memory.block_size(specs, "npu"), memory.block_size(specs, "npu", 16)) == (128, 16)
    monkeypatch.setattr("whorl.nn.cache.block_size", lambda _: 8)
    assert LLM(model=MockModel(), device="cpu", num_blocks=4).pool.block_size == 8
    assert DraftModel(model=MockModel(), device="cpu", num_blocks=4).pool.block_size == 8
    assert LLM(model=MockModel(), device="cpu", num_blocks=4, block_size=4).pool.block_size == 4


# ---- AscendC's batch-invariant operators


@pytest.fixture
def paper_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A torch_npu of which only the version is looked at."""
    package = types.ModuleType("torch_npu")
    package.__version__ = "2.13.0"  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    installed = _torch_npu.installed
    installed.cache_clear()
    yield package
    installed.cache_clear()


def test_a_package_that_cannot_be_imported_is_a_warning(
    paper_npu: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "batch_invariant_ops.py").write_text("raise ImportError('libcust_opapi.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match=r"batch_invariant_ops is installed but cannot be imported \(libcust_opapi"):
        assert _torch_npu.batch_invariant("npu_mm") is None


def test_the_list_of_operators_names_those_that_run(
    paper_npu: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "default_device", lambda: "npu")
    monkeypatch.setattr(availability, "device_name", lambda _: "Ascend")
    assert "AscendC: none, batch_invariant_ops is not installed" in availability.as_table()
    has_one = Installed(version="2.13.0", arguments={"npu_mm_batch_invariant": ("a", "b")})
    monkeypatch.setattr(_torch_npu, "installed", lambda: has_one)
    assert availability.as_table().splitlines()[1] == "batch-invariant operators of AscendC: npu_mm_batch_invariant"


def test_a_torch_npu_that_is_not_supported_is_said_there(paper_npu: types.ModuleType) -> None:
    paper_npu.__version__ = "2.1.0"  # type: ignore[attr-defined]
    assert _torch_npu.batch_invariant_operators().startswith("torch_npu 2.1.0 is not supported")


def test_an_argument_that_the_package_lacks_is_an_error() -> None:
    name = "npu_fused_infer_attention_score_batch_invariant"
    with pytest.raises(RuntimeError, match=f"{name}: sparse_mode=3 needs another batch_invariant_ops; the installed"):
        call_arguments(name, ["query"], query=0, sparse_mode=3)


# ---- the engine over the real schemas


def prove(folder: Path, runs: tuple[str, ...], *packages: Path) -> dict[str, Any]:
    require_tools()
    with locked():
        environment = live_environment(build(find_wheel(VERSION)))
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, packages), environment["PYTHONPATH"]])
    return run_proof(folder / "found.json", [str(folder), *runs], script=ENGINE, **environment)


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_the_engine_generates_on_an_npu_what_it_does_on_the_cpu(tmp_path: Path, runs: tuple[str, ...]) -> None:
    for run, row in prove(tmp_path, runs).items():
        judge(row, *run.split(":"))


@pytest.mark.parametrize(
    "runs",
    [("window:batch_invariant",), pytest.param(("qwen3:batch_invariant",), marks=pytest.mark.slow)],
    ids=["padded prompts", "packed prompts"],
)
def test_with_batch_invariant_operators_a_request_has_the_bits_it_has_alone(
    tmp_path: Path, runs: tuple[str, ...]
) -> None:
    for run, row in prove(tmp_path, runs, HERE / "npu" / "batch_invariant").items():
        assert row["same_bits"] == [True] * 6
        judge(row, *run.split(":"))


@pytest.mark.slow
def test_experts_run_with_batch_invariant_operators(tmp_path: Path) -> None:
    (row,) = prove(tmp_path, ("experts:batch_invariant",), HERE / "npu" / "batch_invariant").values()
    judge(row, "experts", "batch_invariant")


def judge(row: dict[str, Any], model: str, kind: str) -> None:
    on_npu, on_cpu = row["tokens"]
    assert on_npu == on_cpu
    assert all(on_npu)
    assert row["difference"]["typical"] < ALLOWED
    # Where two experts, or the last key that is chosen and the next, are all but equal, rounding chooses.
    if model not in ("experts", "deepseek", "gpt_oss"):
        assert row["difference"]["worst"] < ALLOWED
    assert row["difference"]["gap"] > 1  # so that rounding did not decide a token
    assert row["block_size"] == 128
    expected = CALLED[model] | QUANTISED.get(kind, set())
    if kind == "batch_invariant":
        expected = expected - set(REPLACED) | {REPLACED[name] for name in expected & set(REPLACED)} | LOGPROBS
        expected |= {"npu_reduce_sum_batch_invariant"} if model == "experts" else set()
    assert set(row["called"]) == expected
    assert {text.partition(":")[0] for text in row["fallbacks"]} == FALLBACKS.get(model, set())
    stats = row["stats"]
    assert stats["num_steps"] > 10  # prompts come in chunks
    assert stats["num_blocks_used"] == 0
    if kind == "crowded":
        assert stats["num_preemptions"] > 0
    else:
        # Two blocks of another's prompt; one, where its picture takes some of a step.
        assert max(row["cached"]) == (128 if model == "vision" else 256)
    if kind not in ("plain", "batch_invariant", *QUANTISED):
        assert stats["num_accepted"] > 20
