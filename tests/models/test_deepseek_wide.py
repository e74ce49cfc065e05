"""DeepSeek-V3.2 in the engine against transformers where it is large: as wide as published, and past 4096 keys."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import Runner, close
from test_deepseek import saved
from test_models import hf_logits
from torch import Tensor

from whorl.engine import weights
from whorl.models.deepseek import DeepSeek
from whorl.ops.latent import indexer

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}
# Every width is the published model's; what is fewer are layers, experts and words.
WIDE: dict[str, Any] = {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048}
WIDE |= {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
WIDE |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WIDE |= {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "rope_parameters": YARN}
WIDE |= {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
FEW = 24  # keys that are chosen in the sparse regime
TOKENS = [(7 * i * i + 3) % 97 for i in range(72)]


def published_sizes(folder: Path) -> tuple[Tensor, Tensor]:
    """A checkpoint of transformers, in bf16, and the logits of its model in fp32: all keys seen, and most left out."""
    torch.manual_seed(1)
    config = DeepSeek.tiny(**WIDE)
    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    hf_config = transformers.AutoConfig.for_model("deepseek_v32", **values, initializer_range=0.02)
    hf = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, tensor in (*hf.named_parameters(), *hf.named_buffers()):
            if name.endswith(("e_score_correction_bias", "k_norm.bias", "norm.weight")):
                tensor.add_(0.1 * torch.randn_like(tensor))
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    hf = hf.float()
    dense = hf_logits(hf, TOKENS)
    for layer in hf.model.layers:
        layer.self_attn.indexer.index_topk = FEW
    return dense, hf_logits(hf, TOKENS)


@pytest.mark.slow
def test_logits_at_the_published_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, to 1e-5 of the largest. About 5 GB at a time, and the file's 2: one model after the other."""
    monkeypatch.setattr("whorl.nn.weights.dense.pack", lambda weight: None)  # which holds a weight once more
    dense, sparse = published_sizes(tmp_path)
    gc.collect()
    model: Any = weights.load_model(tmp_path, device="cpu", dtype="float32", progress=False)
    close(Runner(model).run(TOKENS), dense)
    for layer in model.decoder.layers:
        layer.self_attn.indexer.topk = FEW
    runner = Runner(model)
    actual = torch.cat((runner.run(TOKENS[:50]), runner.run(TOKENS[50:71]), runner.run(TOKENS[71:])))
    close(actual, sparse)
    close(actual[:FEW], dense[:FEW])
    assert float((sparse[FEW:] - dense[FEW:]).abs().max() / dense.abs().max()) > 1e-2, "it does not matter what is seen"


# ---- planted keys

NEEDLE, QUESTION, LENGTH = 5, 6, 4500
PLANTED = (2, 1700, 4099, 4310)


def plant(hf: Any) -> None:
    """One layer, in which the question's index heads all look for what the needle alone has.

    That is in channels which do not turn, so that it is found at any distance.
    """
    attention = hf.model.layers[0].self_attn
    index = attention.indexer
    mark = torch.zeros(index.head_dim)
    mark[index.qk_rope_head_dim :] = torch.tensor([1.0, -1.0]).repeat((index.head_dim - index.qk_rope_head_dim) // 2)
    with torch.no_grad():
        hf.model.embed_tokens.weight[:, :2] = 0
        hf.model.embed_tokens.weight[NEEDLE, 0] = hf.model.embed_tokens.weight[QUESTION, 1] = 3
        index.wk.weight[:, 0] = 9 * mark
        attention.q_a_proj.weight[0, 1] = 9
        index.wq_b.weight.view(index.n_heads, index.head_dim, -1)[:, :, 0] = 3 * mark
        index.weights_proj.weight[:, 1] = 3


def hf_last(hf: Any, tokens: list[int]) -> Tensor:
    """The last token's logits, by chunks through transformers' own cache."""
    cache = transformers.DynamicCache(config=hf.config)
    with torch.inference_mode():
        for at in range(0, len(tokens), 500):
            out = hf(torch.tensor([tokens[at : at + 500]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1]


def last(model: Any, tokens: list[int]) -> Tensor:
    """The last token is decoded."""
    runner = Runner(model, LENGTH)
    runner.run(tokens[:-1])
    return runner.run(tokens[-1:])[-1]


@pytest.mark.slow
def test_planted_keys_decide_past_4096(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4500 keys 16 are chosen, the four planted ones among them: another token in the place of one of those is
    another answer, in the place of one that was not chosen the same bits. transformers says the same each time."""
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": LENGTH, "index_topk": 16}
    hf = saved(tmp_path, DeepSeek.tiny(**sizes))
    plant(hf)
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DeepSeek.tiny(**sizes)))
    model: Any = weights.load_model(tmp_path, device="cpu", progress=False)
    tokens = torch.randint(7, 97, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    for place in PLANTED:
        tokens[place] = NEEDLE
    tokens[-1] = QUESTION
    chosen: list[Tensor] = []
    reference = indexer.paged_indexer.unchecked
    monkeypatch.setattr(
        indexer.paged_indexer, "unchecked", lambda *arguments: chosen.append(reference(*arguments)) or chosen[-1]
    )
    answer = last(model, tokens)
    monkeypatch.undo()
    seen = chosen[-1][-1].tolist()
    assert len(seen) == 16
    assert set(PLANTED) < set(seen)
    close(answer, hf_last(hf, tokens))
    for place in (PLANTED[0], PLANTED[-1]):
        other = last(model, tokens[:place] + [50] + tokens[place + 1 :])
        assert float((other - answer).abs().max() / answer.abs().max()) > 1e-2
    close(other, hf_last(hf, tokens[:place] + [50] + tokens[place + 1 :]))
    unseen = next(i for i in range(4200, LENGTH) if i not in seen)
    assert torch.equal(last(model, tokens[:unseen] + [50] + tokens[unseen + 1 :]), answer)
