"""`checklist` on live models: Megatron-core's GPTModel where it is installed, transformers'; a fault for each case."""

import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_rank import one_cpu_rank
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLTextConfig, Qwen3VLTextModel

from whorl.doctor import checklist
from whorl.doctor.ten_cases import CASES

SEQ, BATCH = 8, 2


def qwen3_vl(**settings: Any) -> Qwen3VLTextModel:
    config = Qwen3VLTextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=128, vocab_size=32,
        rope_parameters={"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 1e4,
                         "mrope_interleaved": True} | settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLTextModel(config)


def qwen3(**settings: Any) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=32, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def image_positions() -> torch.Tensor:
    return torch.randint(0, 40, (3, BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def batch_of(model: Any) -> dict[str, Any]:
    ids = torch.randint(0, 32, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids} | ({"position_ids": image_positions()} if isinstance(model, Qwen3VLTextModel) else {})


def outcomes(answers: Any) -> dict[str, str]:
    return {case.name: case.outcome for case in answers.cases}


def test_transformers_mrope_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    model = qwen3_vl().train()
    answers = checklist(model, batch_of(model))
    by_name = outcomes(answers)
    assert by_name.pop("branch") == "does not apply"
    assert by_name.pop("fusion switches") == "does not apply"
    assert set(by_name.values()) == {"pass"}, answers
    assert answers.passed
    assert model.training
    assert not model.rotary_emb._forward_pre_hooks
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(CASES) == 10
    assert "interleaved sections [24, 20, 20]: cache_mode='interleave'" in printed[5]


def test_transformers_text_model_passes() -> None:
    model = qwen3()
    by_name = outcomes(checklist(model, batch_of(model)))
    assert [name for name, outcome in by_name.items() if outcome == "does not apply"] == [
        "branch",
        "fusion switches",
        "axes of the channels",
    ]
    assert "fail" not in by_name.values()


def test_a_forward_may_call_its_first_parameter_as_it_likes() -> None:
    model = qwen3_vl()
    kind = type(model.rotary_emb)

    class Renamed(kind):  # type: ignore[misc, valid-type]
        def forward(this, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return kind.forward(this, x, position_ids)

    class Static(kind):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return kind.forward(model.rotary_emb, x, position_ids)

    for other in (Renamed, Static):
        model.rotary_emb.__class__ = other
        answers = checklist(model, batch_of(model))
        assert answers.passed, answers
        assert answers["position ids"].found == f"position_ids {[3, BATCH, SEQ]}"


def test_positions_under_another_name_are_said_to_be_unknown() -> None:
    model = qwen3_vl()
    kind = type(model.rotary_emb)

    class Other(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor, where: torch.Tensor) -> Any:
            return kind.forward(self, x, where)

    model.rotary_emb.__class__ = Other
    answers = checklist(model, batch_of(model))
    assert answers["position ids"].outcome == "fail"
    assert "was called with x, where, expected position_ids" in answers["position ids"].found
    case = answers["npu_mrope arguments"]
    assert (case.outcome, case.found[:36]) == ("does not apply", "its positions are unknown: the rotar")


def test_a_forward_that_raises_first_leaves_no_positions() -> None:
    model = qwen3_vl()
    answers = checklist(model, {"input_ids": "no tokens"})
    assert "the forward raised" in answers["position ids"].found
    assert answers["npu_mrope arguments"].outcome == "does not apply"
    assert not any("TypeError: int()" in case.found for case in answers.cases)


def test_a_model_without_rotation_is_refused() -> None:
    with pytest.raises(ValueError, match="no module with a rotary_pos_emb"):
        checklist(torch.nn.Linear(1, 1), {})


# Megatron-core.

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine, which need a GPU
    try:
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer import attention, dot_product_attention
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError:
        parallel_state = None
needs_megatron = pytest.mark.skipif(parallel_state is None, reason="pip install megatron-core==0.16.1")
quiet = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with one_cpu_rank(parallel_state, dot_product_attention):
        yield


def megatron(kind: str = "mrope", **settings: Any) -> Any:
    config = TransformerConfig(
        num_layers=1, hidden_size=128, num_attention_heads=2, num_query_groups=1, kv_channels=64, ffn_hidden_size=32,
        use_cpu_initialization=True, mrope_section=[8, 12, 12] if kind == "mrope" else None, attention_dropout=0.0,
        hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, normalization="RMSNorm", **settings,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    torch.manual_seed(0)
    return GPTModel(config, spec, 64, 64, position_embedding_type=kind)


def megatron_batch(kind: str = "mrope") -> dict[str, Any]:
    positions = image_positions() if kind == "mrope" else torch.arange(SEQ).expand(BATCH, -1)
    mask = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)[None, None]
    return {"input_ids": torch.arange(16).view(BATCH, SEQ), "position_ids": positions, "attention_mask": mask}


@needs_megatron
@quiet
@pytest.mark.parametrize("kind", ["mrope", "rope"])
def test_megatron_model_passes(kind: str, one_rank: None) -> None:
    answers = checklist(megatron(kind), megatron_batch(kind))
    by_name = outcomes(answers)
    other = [name for name, outcome in by_name.items() if outcome == "does not apply"]
    assert other == ([] if kind == "mrope" else ["position ids", "axes of the channels"])
    assert answers.passed, str(answers)
    assert "2 context-parallel ranks" in answers["packed and context parallel"].found


@needs_megatron
@quiet
@pytest.mark.parametrize("operator", ["rope", "mrope"])
def test_our_adapter_passes_and_its_switch_is_the_fallback(operator: Any, one_rank: None) -> None:
    from whorl.adapters import megatron as adapter

    model = megatron()
    installed = adapter.install(model, operator=operator, max_position=64)
    answers = checklist(model, megatron_batch(), switch=installed)
    other = [name for name, outcome in outcomes(answers).items() if outcome == "does not apply"]
    looked_up = ["rotary object", "axes of the channels", "packed and context parallel"] if operator == "mrope" else []
    assert other == [*looked_up, "profiler"]  # on the CPU it is plain torch
    assert answers.passed, str(answers)
    assert installed.enabled
    assert installed.calls[operator] > 0
    assert installed.calls["megatron: switched off"] == 3  # bf16, fp16, fallback
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    if operator == "rope":  # Megatron rotates in 16 bits, we in float32: near, and not equal
        assert "off by 0 of" not in answers["numbers in bf16 and fp16"].found


@needs_megatron
@quiet
def test_a_fused_path_that_rotates_otherwise(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.adapters import megatron as adapter

    model = megatron()
    installed = adapter.install(model)
    monkeypatch.setattr(adapter, "rope", lambda q, k, *rest, **more: (q, k))
    answers = checklist(model, megatron_batch(), switch=installed)
    assert [case.name for case in answers.cases if case.outcome == "fail"] == ["numbers in bf16 and fp16", "fallback"]


Change = Callable[[Any, pytest.MonkeyPatch], dict[str, Any] | None]


def other_branch(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.position_embedding_type = "rope"


def plain_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.rotary_pos_emb = RotaryEmbedding(64, 1.0, cp_group=model.rotary_pos_emb.cp_group)


def two_axes(model: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return megatron_batch() | {"position_ids": torch.arange(SEQ).expand(BATCH, -1)}


def fusion_on(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.config.apply_rope_fusion = True


def other_sections(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.mrope_section = model.config.mrope_section = [8, 12, 10]


def swapped_axes(model: Any, patch: pytest.MonkeyPatch) -> None:
    rotary, forward = model.rotary_pos_emb, model.rotary_pos_emb.forward
    patch.setattr(
        rotary, "forward", lambda position_ids, *rest, **more: forward(position_ids[[0, 2, 1]], *rest, **more)
    )


def rotation(change: Callable[..., Any]) -> Change:
    """A fault in the function that attention calls."""

    def plant(model: Any, patch: pytest.MonkeyPatch) -> None:
        function = attention.apply_rotary_pos_emb

        def faulty(t: Any, freqs: Any, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, cp_group: Any = None):
            return change(function, t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, cp_group=cp_group)

        patch.setattr(attention, "apply_rotary_pos_emb", faulty)

    return plant


def wrong_in_half_precision(function: Any, t: Any, freqs: Any, config: Any, **more: Any) -> Any:
    return function(t, freqs if t.dtype == torch.float32 else freqs.to(torch.float16) * 1.1, config, **more)


def forgets_the_pack(function: Any, t: Any, freqs: Any, config: Any, **more: Any) -> Any:
    if more["cu_seqlens"] is not None and t.shape[0] == freqs.shape[0]:
        return function(t[:, None], freqs.flip(0), config, **more | {"cu_seqlens": None}).squeeze(1)
    return function(t, freqs, config, **more)


def forgets_the_rank(function: Any, t: Any, freqs: Any, config: Any, **more: Any) -> Any:
    if more["cu_seqlens"] is not None:
        size = more["cp_group"].size()
        more["cp_group"] = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return function(t, freqs, config, **more)


def does_not_rotate(function: Any, t: Any, freqs: Any, config: Any, **more: Any) -> Any:
    return t * freqs.cos()


FAULTS: dict[str, tuple[Change, str]] = {
    "branch": (other_branch, "position_embedding_type='rope' with MultimodalRotaryEmbedding"),
    "rotary object": (plain_class, "unexpected keyword argument|no channel|indices"),
    "position ids": (two_axes, r"shape \[2, 8\], expected \[3, B, S\]"),
    "fusion switches": (fusion_on, "apply_rope_fusion on"),
    "npu_mrope arguments": (other_sections, "sum to 30, half the rotary size is 32"),
    "axes of the channels": (swapped_axes, "follow other axes than chunked"),
    "numbers in bf16 and fp16": (rotation(wrong_in_half_precision), "float16 off by"),
    "packed and context parallel": (rotation(forgets_the_pack), "the pack is not rotated"),
    "profiler": (rotation(does_not_rotate), "no rotary operator"),
    "fallback": (rotation(does_not_rotate), "results differ by"),
}


def test_there_is_a_fault_for_every_case() -> None:
    assert list(FAULTS) == list(CASES)


@needs_megatron
@quiet
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_case(name: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = FAULTS[name]
    model = megatron()
    batch = change(model, monkeypatch) or megatron_batch()
    answers = checklist(model, batch)
    assert answers[name].outcome == "fail", str(answers)
    assert re.search(said, answers[name].found), answers[name].found
    assert not answers.passed


@needs_megatron
@quiet
def test_a_rank_that_takes_anothers_slices(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = megatron()
    rotation(forgets_the_rank)(model, monkeypatch)
    case = checklist(model, megatron_batch())["packed and context parallel"]
    assert (case.outcome, case.found) == (
        "fail",
        "THD: context-parallel rank 1 of 2 is not rotated as its sequences are one by one",
    )


def test_dynamic_frequencies_differ_between_slices() -> None:
    """They follow the longest position of the call, which a context-parallel rank does not see."""
    model = qwen3(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, max_position_embeddings=6)
    case = checklist(model, batch_of(model))["packed and context parallel"]
    assert case.outcome == "fail"
    assert "gets other angles" in case.found


def test_a_fused_switch_that_reaches_nothing() -> None:
    model = qwen3()
    case = checklist(model, batch_of(model), switch=SimpleNamespace(enabled=True))["profiler"]
    assert case.outcome == "fail"
    assert case.found.startswith("switch on, but only aten::neg")
