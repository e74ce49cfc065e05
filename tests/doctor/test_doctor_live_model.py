"""`guard` on live modules: small fakes with the real class names, and real ones where they are installed."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from whorl.doctor import GuardError, check_npu_mrope, guard


class Qwen3VLMultimodalRotaryEmbedding(nn.Module):
    """Megatron Bridge 0.5's interface: get_rotary_seq_len exists, forward still takes position ids."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(dim // 2), persistent=False)
        self.is_thd_format = False
        self.cp_group: Any = None

    def get_rotary_seq_len(self) -> int:
        return 7

    def forward(self, position_ids: Any, mrope_section: Any = None, packed_seq_params: Any = None) -> Any:
        return position_ids


class RotaryEmbedding(nn.Module):
    def forward(self, max_seq_len: int) -> int:
        return max_seq_len


class GPTModel(nn.Module):
    def __init__(self, branch: str = "mrope", rotary: nn.Module | None = None, **config: Any) -> None:
        super().__init__()
        settings = {"position_embedding_type": branch, "mrope_section": [24, 20, 20], "apply_rope_fusion": False}
        self.config = SimpleNamespace(**(settings | config))
        self.position_embedding_type = branch
        self.mrope_section = self.config.mrope_section
        self.rotary_pos_emb = rotary or Qwen3VLMultimodalRotaryEmbedding()

    def forward(self, position_ids: Any, **more: Any) -> Any:
        if self.position_embedding_type == "rope":
            return self.rotary_pos_emb(self.rotary_pos_emb.get_rotary_seq_len())
        return self.rotary_pos_emb(position_ids, self.mrope_section, **more)


def error(model: nn.Module, **options: Any) -> Any:
    with pytest.raises(GuardError) as caught:
        guard(model, **options)
    return caught.value.report.findings[0]


def test_healthy_model_passes_and_leaves_nothing_behind() -> None:
    model = GPTModel()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = guard(model, args=SimpleNamespace(use_fused_rotary_pos_emb=False))
        assert len(model.rotary_pos_emb._forward_pre_hooks) == 1
        model(torch.zeros(3, 2, 5, dtype=torch.long))
    assert report.findings == ()
    assert not model.rotary_pos_emb._forward_pre_hooks


def test_mrope_class_in_the_rope_branch() -> None:
    finding = error(GPTModel("rope"))
    assert finding.code == "rope-branch-mismatch"
    assert finding.fix == ("position_embedding_type=mrope", "mrope_section=[24, 20, 20]", "apply_rope_fusion=False")


def test_plain_class_in_the_mrope_branch() -> None:
    assert error(GPTModel("mrope", RotaryEmbedding())).code == "rope-branch-mismatch"
    assert guard(GPTModel("rope", RotaryEmbedding())).findings == ()


def test_model_inside_a_model() -> None:
    outer = nn.Sequential(nn.Linear(1, 1), GPTModel("rope"))
    assert error(outer).where == "1"


def test_fused_switches() -> None:
    assert error(GPTModel(use_fused_rotary_pos_emb=True)).code == "fused-rope-needs-rope"
    assert error(GPTModel(), args=SimpleNamespace(use_fused_rotary_pos_emb=True)).code == "fused-rope-needs-rope"
    assert error(GPTModel(apply_rope_fusion=True)).code == "rope-fusion-with-mrope"


def test_sections_against_frequencies() -> None:
    finding = error(GPTModel(mrope_section=[16, 24, 16]))
    assert (finding.code, finding.expected) == ("mrope-section-sum", "64")


def test_config_changed_after_the_build_warns() -> None:
    model = GPTModel()
    model.config.position_embedding_type = "rope"
    with pytest.warns(UserWarning, match="config-overrides-argument"):
        guard(model)


def test_low_precision_frequencies_warn() -> None:
    with pytest.warns(UserWarning, match=r"low-precision-angles at rotary_pos_emb: inv_freq is torch\.bfloat16"):
        guard(GPTModel().to(torch.bfloat16))


def test_warn_instead_of_raise() -> None:
    with pytest.warns(UserWarning, match="rope-branch-mismatch"):
        report = guard(GPTModel("rope"), action="warn")
    assert report.failed
    with pytest.raises(ValueError, match="action must be"):
        guard(GPTModel(), action="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 5), (2, 2, 5), (4, 2, 5)])
def test_first_forward_checks_position_ids(shape: tuple[int, ...]) -> None:
    model = GPTModel()
    guard(model)
    with pytest.raises(GuardError, match="position-ids-shape"):
        model(torch.zeros(shape, dtype=torch.long))
    model(torch.zeros(shape, dtype=torch.long))  # only the first forward is watched


@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 1, 10)])
def test_batched_and_packed_position_ids_pass(shape: tuple[int, ...]) -> None:
    model = GPTModel()
    guard(model)
    model(torch.zeros(shape, dtype=torch.long), packed_seq_params=None)


class MRotaryEmbedding(nn.Module):
    """vLLM's interface: text alone has positions of one axis."""

    def forward(self, positions: Any, query: Any, key: Any = None) -> Any:
        return query


def test_vllm_class_takes_text_positions() -> None:
    layer = nn.Module()
    layer.rotary_emb = MRotaryEmbedding()
    guard(layer)
    layer.rotary_emb(torch.zeros(5, dtype=torch.long), torch.zeros(5, 128))


def test_bridge_0_5_is_caught_at_the_call() -> None:
    model = GPTModel()
    guard(model)
    model.position_embedding_type = "rope"  # changed after the build, as a merge of configs does
    with pytest.raises(GuardError, match=r"rope-branch-mismatch.*sequence length \(7\)"):
        model(torch.zeros(3, 1, 5))


def test_position_past_the_table() -> None:
    model = GPTModel()
    model.rotary_pos_emb.cos_sin_cache = torch.zeros(16, 128)
    guard(model)
    with pytest.raises(GuardError, match="table-too-short"):
        model(torch.full((3, 1, 1), 16))


def test_packed_over_context_parallel_ranks() -> None:
    model = GPTModel()
    model.rotary_pos_emb.cp_group = SimpleNamespace(size=lambda: 2)
    guard(model)
    with pytest.warns(UserWarning, match="packed-positions"):
        model(torch.zeros(3, 1, 4), packed_seq_params=object())
    model.rotary_pos_emb.is_thd_format = True
    guard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(3, 1, 4), packed_seq_params=object())


class MultimodalRotaryEmbedding(Qwen3VLMultimodalRotaryEmbedding):
    """Megatron Core's name: it fuses a batch of one."""


@pytest.mark.parametrize(("batch", "warned"), [(1, 0), (2, 1)])
def test_fused_batches_warn(batch: int, warned: int) -> None:
    model = GPTModel(rotary=MultimodalRotaryEmbedding(), apply_rope_fusion=True)
    assert guard(model).findings == ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.zeros(3, batch, 4))
    assert ["mrope-batch-unfused" in str(warning.message) for warning in caught] == [True] * warned


def test_strided_positions_on_an_npu_warn() -> None:
    class OnNpu:
        device, shape = "npu:0", (3, 1, 4)

        def is_contiguous(self) -> bool:
            return False

        def numel(self) -> int:
            return 12

    model = GPTModel()
    guard(model)
    with pytest.warns(UserWarning, match="positions-not-contiguous"):
        model(OnNpu())


def test_arguments_of_npu_mrope() -> None:
    q, k, table = torch.zeros(5, 4 * 128), torch.zeros(5, 128), torch.zeros(64, 128)
    positions = torch.zeros(3, 5, dtype=torch.long)
    assert check_npu_mrope(positions, q, k, table, 128, mrope_section=[24, 20, 20], cache_mode="interleave") is None
    assert "sum to 60" in str(check_npu_mrope(positions, q, k, table, 128, mrope_section=[20, 20, 20]))
    assert "dtype" in str(
        check_npu_mrope(positions, q.bfloat16(), k.bfloat16(), table, 128, mrope_section=[24, 20, 20])
    )
    assert "2-D" in str(check_npu_mrope(positions, q.view(5, 4, 128), k, table, 128, mrope_section=[24, 20, 20]))


def test_real_megatron_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    embedding = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    rotary = embedding.MultimodalRotaryEmbedding(128, 1.0, cp_group=SimpleNamespace(size=lambda: 1))
    model = GPTModel(rotary=rotary, mrope_section=[16, 24, 24])
    guard(model)
    freqs = model(torch.zeros(3, 2, 5, device=rotary.inv_freq.device))
    assert freqs.shape == (5, 2, 1, 128)
    assert error(GPTModel("rope", rotary)).code == "rope-branch-mismatch"


def test_real_transformers_model_raises_no_alarm() -> None:
    from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

    config = Qwen3VLTextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=32,
        rope_parameters={"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 1e4},
    )  # fmt: skip
    model = Qwen3VLTextModel(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guard(model).findings == ()
    model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.warns(UserWarning, match="low-precision-angles"):
        guard(model.to(torch.bfloat16))


def test_guard_needs_no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert error(GPTModel("rope")).code == "rope-branch-mismatch"
    assert guard(nn.Linear(1, 1)).findings == ()
