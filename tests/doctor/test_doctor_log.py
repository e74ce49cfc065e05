"""The doctor's reading of logs and profiler traces."""

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.doctor import BadInput, check
from whorl.doctor.command import run
from whorl.doctor.log import explain
from whorl.doctor.paths import OPERATORS
from whorl.doctor.symptoms import SYMPTOMS
from whorl.doctor.trace import EVIDENCE, UNFUSED, operators_of, read_trace
from whorl.doctor.tracebacks import read_failures

HERE = Path(__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
LOGS: dict[str, str] = {item["line"]: item["code"] for item in yaml.safe_load((HERE / "logs.yaml").read_text())}


@pytest.mark.parametrize("line", LOGS)
def test_log_is_explained(line: str) -> None:
    findings = explain(f"Traceback (most recent call last):\n  File x\n{line}\nmore", "job.log")
    assert [finding.code for finding in findings] == [LOGS[line]]
    message = findings[0].found.split(" (in ")[0]
    assert message in line
    assert findings[0].where == f"job.log:{3 + line.count(chr(10), 0, line.find(message))}"


def test_every_symptom_has_a_line() -> None:
    unused = [
        s.text for s in SYMPTOMS if not any(f.why.startswith(s.cause) for line in LOGS for f in explain(line, "log"))
    ]
    assert unused == []


def test_megatron_core_still_says_these_lines() -> None:
    core = pytest.importorskip("megatron.core")
    text = "".join(file.read_text() for file in Path(core.__path__[0]).rglob("*.py") if _rotary_source(file))
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    for line in (
        "apply_rope_fusion does not support mRoPE in bshd format when bs > 1",
        "mrope require mrope_section setting",
        "cp_group must be provided for THD format RoPE",
        "RoPE fusion is not supported for DSAttention",
        "apply_rope_fusion for MLA only works with YARN RoPE",
        "apply_rope_fusion is not available",
        "is not supported by TE's fused RoPE",
        "must be a multiple or divisor of",
    ):
        assert line in text


def _rotary_source(file: Path) -> bool:
    return file.name in ("rope_utils.py", "gpt_model.py", "transformer_config.py")


def test_unknown_log_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text("Traceback (most recent call last):\nOSError: disk full\n")
    assert run(None, log=tmp_path / "job.log", as_json=True) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["code"], finding["severity"], finding["found"]) == (
        "log-not-recognised",
        "note",
        "OSError: disk full",
    )


def test_pasted_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO((EXAMPLES / "logs" / "qwen3_vl_bridge_0_4.log").read_text()))
    assert run(None, log="-") == 1
    assert "rope-branch-mismatch" in capsys.readouterr().out


# Traces.


def write_trace(file: Path, *names: str) -> Path:
    """A trace of host and device events as torch profiler and Ascend's profiler write them."""
    events = [{"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": 1} for at, name in enumerate(names)]
    file.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return file


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


@pytest.mark.parametrize("rotate", [rotate_half, rotate_pairs])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_unfused_rotation_in_a_real_trace(rotate: Any, suffix: str, tmp_path: Path) -> None:
    q, k, cos, sin = torch.randn(4, 2, 3, 8).unbind(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rotate(q, cos, sin), rotate(k, cos, sin)
    file = tmp_path / f"trace{suffix}"
    profile.export_chrome_trace(str(file))
    assert read_trace(file)[UNFUSED] == 2


def test_matmul_trace_has_no_rotation(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (torch.randn(4, 4) @ torch.randn(4, 4)).neg()
    profile.export_chrome_trace(str(tmp_path / "t.json"))
    assert read_trace(tmp_path / "t.json") == {}
    assert [f.code for f in check(None, trace=tmp_path / "t.json").findings] == ["trace-without-rotary"]


SEEN = {
    "npu::npu_mrope": "npu_mrope",
    "aclnnRopeWithSinCosCache_RopeWithSinCosCache": "npu_mrope",
    "npu::npu_rotary_mul": "npu_rotary_mul",
    "RotaryPositionEmbedding": "npu_rotary_position_embedding",
    "npu_rotary_position_embedding": "npu_rotary_position_embedding",
    "aclnnInterleaveRope": "npu_interleave_rope",
    "aclnnApplyRotaryPosEmbV2": "npu_apply_rotary_pos_emb",
    "atb::_npu_rotary_embedding": "_npu_rotary_embedding",
    "whorl::rope": "whorl",
    "_mrope_kernel": "whorl",
    "_triton_mrope_forward": "triton_mrope",
    "vllm::npu_rotary_embedding": "triton_rope",
    "void transformer_engine::fused_rope_forward_kernel<bf16>": "te_fused_rope",
    "void transformer_engine::fused_rope_thd_forward_kernel<bf16>": "te_fused_rope_thd",
    "rotary_fwd_q_kernel": "mla_fused_rope",
    "_C::rotary_embedding": "vllm_rotary_embedding",
    "_C_ascend::rotary_embedding": "ascend_rotary_embedding",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": "vllm_rotary_embedding",
    "triton_poi_fused_add_cat_cos_mul_neg_sin_0": "inductor",
    "triton_poi_fused_cat_mul_neg_3": "inductor",
    "aten::view_as_complex": "torch_complex",
}


@pytest.mark.parametrize("name", SEEN)
def test_event_names(name: str) -> None:
    assert SEEN[name] in operators_of(name)


def test_every_operator_can_be_seen() -> None:
    seen = {operator for operators in EVIDENCE.values() for operator in operators.split()} | set(operators_of(UNFUSED))
    assert seen == set(OPERATORS)


@pytest.mark.parametrize("name", ["aten::mul", "npu::npu_fusion_attention", "triton_poi_fused_add_mul_1", "aten::neg"])
def test_other_events_are_not_rotary(name: str) -> None:
    assert operators_of(name) == ()


def test_trace_agrees_with_the_path(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.json", "aten::mm", "npu::npu_rotary_position_embedding", "RotaryPositionEmbedding"
    )
    report = check(EXAMPLES / "qwen3_30b_mindspeed", trace=trace)
    assert report.ran == {"npu::npu_rotary_position_embedding": 1, "RotaryPositionEmbedding": 1}
    assert report.findings == ()


def test_trace_disagrees_with_the_path(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.json", "aten::neg", "aten::cat", "aten::mul")
    (finding,) = check(EXAMPLES / "qwen3_30b_mindspeed", trace=trace).findings
    assert (finding.code, finding.severity) == ("trace-disagrees", "warning")
    assert finding.found == f"{UNFUSED} x1"
    assert finding.expected.startswith("npu_rotary_position_embedding")


def test_compiled_torch_code_is_the_same_path(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.json", "triton_poi_fused_add_cat_mul_neg_0")
    assert check(EXAMPLES / "qwen3_vl_fixed", trace=trace).findings == ()


def test_backward_alone_is_not_the_forward_path(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.json", "npu::npu_rotary_mul_backward", "RotaryPositionEmbeddingGrad")
    assert [f.code for f in check(EXAMPLES / "qwen3_30b_mindspeed", trace=trace).findings] == ["trace-without-rotary"]


def test_one_of_verls_two_paths_is_agreement(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.json", "npu::npu_mrope")
    assert "trace-disagrees" not in [f.code for f in check(EXAMPLES / "verl_qwen2_5_vl", trace=trace).findings]


def test_trace_alone_says_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None, trace=write_trace(tmp_path / "t.json", "npu::npu_mrope", "npu::npu_mrope")) == 0
    assert "2 x        npu::npu_mrope" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", '{"a": 1}', "3"])
def test_bad_trace(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(BadInput, match="export_chrome_trace"):
        check(None, trace=tmp_path / "t.json")


def test_bad_gzip(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(BadInput, match="export_chrome_trace"):
        check(None, trace=tmp_path / "t.json.gz")


# Logs of public threads.

REAL: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "real_logs.yaml").read_text())


@pytest.mark.parametrize("name", REAL)
def test_real_log(name: str) -> None:
    findings = explain(REAL[name]["log"], "job.log")
    assert [finding.code for finding in findings if finding.severity != "note"] == REAL[name]["codes"]
    assert bool(REAL[name]["codes"]) != name.startswith("healthy_")


def test_half_of_the_real_logs_are_healthy() -> None:
    real = [name for name, case in REAL.items() if case["source"].startswith("https://github.com/")]
    healthy = [name for name in real if name.startswith("healthy_")]
    assert len(healthy) >= 15
    assert len(real) - len(healthy) >= 20
    assert {case["source"] for name, case in REAL.items() if name not in real} == {"made"}


# Reading tracebacks.


def test_every_exception_of_a_chain_has_frames_of_its_own() -> None:
    text = """
Traceback (most recent call last):
  File "/a/rotary_embedding.py", line 1, in forward
    cos, sin = self.cos_sin_cache[positions].chunk(2, -1)
ValueError: not this one

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/a/loader.py", line 2, in load
    return rows[index]
IndexError: index 9 is out of bounds for dimension 0 with size 9
"""
    failures, _ = read_failures(text)
    assert [failure.text.split(":")[0] for failure in failures] == ["ValueError", "IndexError"]
    assert [failure.origin.function for failure in failures if failure.origin] == ["forward", "load"]
    assert [finding.code for finding in explain(text, "log")] == ["log-not-recognised"]


def test_ranks_that_print_at_once_are_told_apart() -> None:
    lines = ["Traceback (most recent call last):", '  File "/a.py", line 1, in f{0}', "    g()", "ValueError: of {0}"]
    mixed = ((rank, line.format(rank)) for line in lines for rank in range(3))
    text = "\n".join(f"2026-01-0{rank + 1} 00:00:0{rank} [rank{rank}]: {line}" for rank, line in mixed)
    failures, _ = read_failures(text)
    assert [(failure.text, failure.frames[0].function) for failure in failures] == [
        (f"ValueError: of {rank}", f"f{rank}") for rank in range(3)
    ]
    assert [failure.lines for failure in failures] == [(10,), (11,), (12,)]


def test_the_frame_that_raised_is_not_inside_torch() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/v/mrope.py", line 9, in forward_native\n'
        "    cos_sin = self.cos_sin_cache[positions]\n"
        '  File "/site-packages/torch/nn/modules/module.py", line 1, in __getattr__\n    return x\n'
        "IndexError: index 70000 is out of bounds for dimension 0 with size 65536\n"
    )
    (finding,) = explain(text, "log")
    assert finding.code == "table-too-short"
    assert finding.found.endswith("(in forward_native, /v/mrope.py:9)")


def test_a_warning_in_quoted_source_is_not_a_warning() -> None:
    warned = 'warnings.warn("apply_rope_fusion does not support mRoPE in bshd format when bs > 1.")'
    text = f'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    {warned}\nOSError: disk\n'
    assert [finding.code for finding in explain(text, "log")] == ["log-not-recognised"]


PARTS = [
    "Traceback (most recent call last):", '  File "/rope.py", line 3, in forward', "    x[i]", "    ~^^", "|", "",
    "IndexError: a", "AssertionError", "[rank0]: ", "(W pid=1) ERROR 01-01 00:00:00 [a.py:1] ",
    "During handling of the above exception",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12), st.text(max_size=3))
def test_any_log_can_be_read(parts: list[str], glue: str) -> None:
    for text in ("\n".join(parts), glue.join(parts)):
        failures, lines = read_failures(text)
        assert len(lines) == len(text.splitlines())
        assert all(1 <= number <= len(lines) for failure in failures for number in failure.lines)
