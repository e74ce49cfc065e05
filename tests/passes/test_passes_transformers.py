"""Models of transformers, shared out by its own tp_plan: captured as they are, rewritten, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import shared
from torch import Tensor
from transformers.distributed.configuration_utils import DistributedConfig

from whorl import passes
from whorl.passes import SequenceParallel

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "use_cache": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# transformers has no plan for Qwen3-VL's text model: this is Qwen3's.
VL_PLAN = {f"layers.*.{name}": "colwise" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
VL_PLAN |= {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise"}
VL_PLAN |= {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"}


FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "qwen3_vl": transformers.Qwen3VLTextModel,
}


def config(kind: str) -> Any:
    more = {"num_hidden_layers": 2, "rope_parameters": ROPE} if kind == "qwen3_vl" else {}
    return FAMILIES[kind].config_class(**SMALL | more)


def inputs(kind: str, shape: tuple[int, int], images: int) -> dict[str, Any]:
    """images: how many tokens are an image's; their embeddings are added behind the first layers, at a mask."""
    generator = torch.Generator().manual_seed(shape[1])
    if kind != "qwen3_vl":
        return {"input_ids": torch.randint(0, 64, shape, generator=generator)}
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.view(-1)[torch.randperm(mask.numel(), generator=generator)[:images]] = True
    return {
        "inputs_embeds": torch.randn(*shape, 32, generator=generator),
        "visual_pos_masks": mask,
        "deepstack_visual_embeds": [torch.randn(images, 32, generator=generator) for _ in range(2)],
    }


def output(model: Any, arguments: dict[str, Any]) -> Tensor:
    out = model(**arguments, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state  # type: ignore[no-any-return]


def on_a_rank(kind: str, folder: str, calls: tuple[Any, ...]) -> dict[str, Any]:
    torch._dynamo.reset()
    transformers.utils.logging.disable_progress_bar()
    plan: Any = VL_PLAN if kind == "qwen3_vl" else "auto"
    plans = DistributedConfig(tp_plan=plan, tp_size=dist.get_world_size())
    whole = FAMILIES[kind].from_pretrained(folder).eval()
    model = FAMILIES[kind].from_pretrained(folder, distributed_config=plans).eval()
    mesh = model._device_mesh
    group = (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()  # from 5.22 on it has other dims, too
    hooks_before = sum(bool(m._backward_hooks) for m in model.modules())
    embedding, whole_embedding = (m.get_input_embeddings().weight for m in (model, whole))
    short = passes.compile(model, SequenceParallel(group=group, min_tokens=15), backend="eager", dynamic=True)
    equal, runs, errors = [], [], []
    with torch.no_grad():
        for shape, images in calls:
            arguments = inputs(kind, shape, images)
            a = output(short, arguments)
            runs.append(short.last_run)
            short.force = "plain"
            equal.append(torch.equal(a, output(short, arguments)))
            short.force = ""
            errors.append(float((a - output(whole, arguments)).abs().max()))
    return {
        "equal": equal,
        "runs": runs,
        "error": max(errors),
        "captures": len(short.reports),
        "rewrites": short.report.rewrites,
        "gathered": [g.module for g in short.report.gathers],
        "text": str(short.report),
        "hooks": sum(bool(m._backward_hooks) for m in model.modules()),
        "hooks_before": hooks_before,
        "splits_embedding": getattr(embedding, "to_local", lambda: embedding)().shape != whole_embedding.shape,
    }


def found_on_ranks(kind: str, folder: Path, *calls: Any) -> dict[str, Any]:
    FAMILIES[kind](config(kind)).save_pretrained(folder)
    first, second = shared(2).run(on_a_rank, kind, str(folder), calls, timeout=600)
    assert first["text"] == second["text"]
    assert all(first["equal"] + second["equal"]), first
    assert first["error"] < 1e-5, "as the model of one process"
    assert first["captures"] == 1
    return first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_tp_plan(kind: str, tmp_path: Path) -> None:
    result = found_on_ranks(kind, tmp_path, ((2, 11), 0), ((3, 5), 0), ((2, 7), 0))
    assert result["runs"] == ["rewritten", "rewritten", "plain"]
    # Both sums of the layer, and from 5.22 on that of the embedding; the gather of logits over the vocabulary stays.
    sums = 2 + result["splits_embedding"]
    assert result["rewrites"] == sums
    assert result["gathered"][-2:] == ["model.layers.0.post_attention_layernorm", "lm_head"]
    assert len(result["gathered"]) == sums
    assert result["hooks"] == result["hooks_before"], "hooks for gradients are put back"


@pytest.mark.slow
def test_vision_embeddings_added_at_a_mask(tmp_path: Path) -> None:
    result = found_on_ranks("qwen3_vl", tmp_path, ((2, 11), 5), ((3, 5), 9))
    assert result["rewrites"] == 4
    assert "masks 2" in result["text"]
    assert result["gathered"] == [
        *("layers.0.post_attention_layernorm", "layers.1.input_layernorm"),
        *("layers.1.post_attention_layernorm", "norm"),
    ], "rows stay on their rank across the embeddings"
