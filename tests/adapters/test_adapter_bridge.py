"""Our operators in Megatron-Bridge's own Qwen3-VL classes, the rotary embedding and the self-attention of its wheels.

The package imports Transformer Engine, which needs a GPU; the modules of these two classes do not. So they are loaded
from the unpacked wheel, with the packages above them left empty, into a small Megatron model on the CPU.
"""

import importlib
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_models import (
    CLOSE,
    HEAD_DIM,
    HEADS,
    MARKS,
    assert_equals,
    inputs,
    logits_and_gradients,
    make_model,
    one_rank,
    packing,
    rotated,
    set_context_parallel,
)

from whorl.adapters import megatron as adapter
from whorl.positions import context_slice

pytestmark = MARKS
CACHE = Path(__file__).parents[2] / ".cache" / "megatron_bridge"
QWEN3_VL = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
# None: Bridge's own angles; it knows the sections' layout itself.
OPTIONS = [{}, {"layout": "interleaved"}, {"operator": "mrope", "layout": "interleaved", "max_position": 40}]


def find_wheel(version: str) -> Path:
    pattern = f"megatron_bridge-{version}-*.whl"
    if not (wheels := list(CACHE.glob(pattern))):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
        where = ["--timeout=20", "--retries=1", f"--dest={CACHE}", f"megatron-bridge=={version}"]
        ran = subprocess.run(pip + where, capture_output=True, text=True, check=False)
        wheels = list(CACHE.glob(pattern))
        if not wheels:
            reason = (ran.stderr.strip().splitlines() or ["pip downloaded nothing"])[-1]
            pytest.skip(f"the megatron-bridge {version} wheel cannot be had: {reason}")
    return wheels[0]


@pytest.fixture(scope="module", params=["0.4.2", "0.5.0"])
def bridge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The two modules of one version: 0.5 added get_rotary_seq_len."""
    root = tmp_path_factory.mktemp("bridge")
    with zipfile.ZipFile(find_wheel(request.param)) as archive:
        archive.extractall(root)
    names = QWEN3_VL.split(".")
    try:
        for count in range(2, len(names) + 1):
            package = types.ModuleType(".".join(names[:count]))
            package.__path__ = [str(root.joinpath(*names[:count]))]
            sys.modules[package.__name__] = package
        parts = {name: importlib.import_module(f"{QWEN3_VL}.{name}") for name in ("rope", "attention")}
        with one_rank():
            yield SimpleNamespace(**parts)
    finally:
        for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
            del sys.modules[name]


def make_bridge_model(bridge: SimpleNamespace, **settings: Any) -> Any:
    """A Megatron model as Qwen3VLGPTModel rebuilds it."""
    model = make_model(sections=(3, 3, 2), **settings)
    model.rotary_pos_emb = bridge.rope.Qwen3VLMultimodalRotaryEmbedding(
        kv_channels=HEAD_DIM, cp_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    )
    model.config.apply_rotary_pos_emb_in_fp32 = False  # a field of Bridge's configuration
    for layer in model.decoder.layers:
        layer.self_attention.__class__ = bridge.attention.Qwen3VLSelfAttention
    return model


@pytest.mark.parametrize("options", OPTIONS)
def test_bridges_model_equals_itself(bridge: SimpleNamespace, options: dict[str, Any]) -> None:
    model, arguments = make_bridge_model(bridge), inputs("mrope")
    expected = logits_and_gradients(model, arguments)
    with adapter.install(model, **options) as installation:
        assert_equals(logits_and_gradients(model, arguments), expected)
        assert installation.calls == {options.get("operator", "rope"): 2}
        installation.enabled = False
        assert_equals(logits_and_gradients(model, arguments), expected)
        assert installation.calls["megatron: switched off"] == 2
    again = logits_and_gradients(model, arguments)
    assert torch.equal(again[0], expected[0])
    assert all(torch.equal(again[1][name], gradient) for name, gradient in expected[1].items())


@pytest.mark.parametrize("options", OPTIONS)
def test_packed_sequences(bridge: SimpleNamespace, options: dict[str, Any]) -> None:
    """Bridge hands each rank the positions of its own tokens."""
    model, lengths = make_bridge_model(bridge), [8, 16, 8]
    model.rotary_pos_emb.is_thd_format = True
    positions = torch.randint(0, 40, (3, 1, sum(lengths)))
    hidden, packed = torch.randn(sum(lengths), 1, HEADS * HEAD_DIM), packing(lengths)
    expected = rotated(model, hidden, model.rotary_pos_emb(positions, model.mrope_section), packed)
    with adapter.install(model, **options):
        carried = model.rotary_pos_emb(positions, model.mrope_section, packed_seq_params=packed)
        torch.testing.assert_close(rotated(model, hidden, carried, packed), expected, **CLOSE)


@pytest.mark.parametrize("options", OPTIONS)
def test_context_parallel_ranks(
    bridge: SimpleNamespace, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without packing Bridge's rotary class slices the angles by Megatron's zig-zag; with a layout the layers do."""
    model, (_, positions, _) = make_bridge_model(bridge), inputs("mrope")
    name = "get_pos_emb_on_this_cp_rank"  # Megatron's needs CUDA
    monkeypatch.setattr(bridge.rope, name, lambda x, dim, group: context_slice(x, group.rank(), group.size(), dim=dim))
    for rank in range(2):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        model.rotary_pos_emb.cp_group = group
        set_context_parallel(model, rank, 2)
        hidden = torch.randn(4, 2, HEADS * HEAD_DIM)
        expected = rotated(model, hidden, model.rotary_pos_emb(positions, model.mrope_section))
        with adapter.install(model, **options):
            carried = model.rotary_pos_emb(positions, model.mrope_section)
            torch.testing.assert_close(rotated(model, hidden, carried), expected, **CLOSE)


def test_its_rotary_class_needs_a_layout_for_the_operator_with_positions(bridge: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="Qwen3VLMultimodalRotaryEmbedding is not Megatron's; give its layout"):
        adapter.install(make_bridge_model(bridge), operator="mrope", max_position=40)


def test_a_model_in_the_rope_branch_is_told_what_to_set(bridge: SimpleNamespace) -> None:
    model = make_bridge_model(bridge)
    model.position_embedding_type = "rope"
    with pytest.raises(ValueError, match=r"takes the 'rope' branch .* Set position_embedding_type='mrope'"):
        adapter.install(model)
