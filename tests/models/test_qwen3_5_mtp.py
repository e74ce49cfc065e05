"""Multi-token prediction of Qwen3.5: the layer against transformers' own, and as drafts beside states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, alone
from one_sequence import close
from schedules import tiny

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.mtp import MTP
from whorl.engine.weights import load_model, load_prediction, random_prediction
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_next import Qwen3Next
from whorl.nn import Step

CONFIGS: dict[str, Any] = {
    "dense": lambda: tiny(Qwen3_5Text, mtp_num_hidden_layers=1),
    "experts": lambda: tiny(Qwen3_5Text, num_experts=4, mtp_num_hidden_layers=1),
    "next": lambda: tiny(Qwen3Next, mtp_num_hidden_layers=1),
}
COUNT = 20


def whole(layer: Any, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Hidden states of all tokens in one call."""
    count = len(token_ids)
    (spec,) = layer.cache_specs()
    step = Step(
        token_ids=token_ids,
        positions=torch.arange(count),
        slots=torch.arange(count),
        block_tables=torch.arange(-(-count // 4), dtype=torch.int32)[None],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        max_position=count,
        states=states,
    )
    with torch.inference_mode():
        return layer.forward(step, [spec.empty(-(-count // 4), 4, "cpu")])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_the_layer_is_transformers_decoder_layer(name: str, tmp_path: Path) -> None:
    """Between the norms and fc that Qwen's own files name; transformers has no class of the whole."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse

    experts = {"num_experts": 4} if name == "experts" else {}
    values = Qwen3_5Text.tiny(mtp_num_hidden_layers=1, num_nextn_predict_layers=1, **experts)
    (folder,) = write_checkpoints(tmp_path, {"model": values}).values()
    target: Any = load_model(folder, device="cpu", progress=False)
    layer: Any = load_prediction(folder, target, progress=False)
    config_class = sparse.Qwen3_5MoeTextConfig if experts else dense.Qwen3_5TextConfig
    ignored = ("architectures", "model_type", "mtp_num_hidden_layers", "num_nextn_predict_layers")
    config = config_class(**{key: value for key, value in values.items() if key not in ignored})
    config._attn_implementation = "eager"
    module, kind = (sparse, "Qwen3_5Moe") if experts else (dense, "Qwen3_5")
    theirs = getattr(module, f"{kind}DecoderLayer")(config, 1).eval()
    parts = layer.mtp
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.2)
    stored = {
        n.removeprefix("mtp.layers.0."): to.tensor() for n, to in nn.destinations(layer).items() if ".layers." in n
    }
    theirs.load_state_dict(_stacked(stored, 4) if experts else stored)
    tokens, states = torch.arange(COUNT) * 7 % 97, torch.randn(COUNT, 32, generator=torch.Generator().manual_seed(3))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)

    with torch.inference_mode():
        embedded = norm(target.embed(tokens), parts.pre_fc_norm_embedding.weight)
        x = torch.cat((embedded, norm(states, parts.pre_fc_norm_hidden.weight)), -1) @ parts.fc.weight.T
        rotary = getattr(module, f"{kind}TextRotaryEmbedding")(config)
        positions = torch.arange(COUNT)[None]
        mask = torch.full((COUNT, COUNT), float("-inf")).triu(1)[None, None]
        out = theirs(x[None], position_embeddings=rotary(x[None], positions), attention_mask=mask)
        expected = norm(out[0] if isinstance(out, tuple) else out, parts.norm.weight).view(COUNT, -1)
    close(whole(layer, tokens, states), expected)


def _stacked(stored: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """With the experts as transformers holds them in memory."""
    by_name = {name: value for name, value in stored.items() if ".experts." not in name}
    pairs = [[stored[f"mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up")] for i in range(count)]
    by_name["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    by_name["mlp.experts.down_proj"] = torch.stack([stored[f"mlp.experts.{i}.down_proj.weight"] for i in range(count)])
    return by_name


@pytest.mark.parametrize("name", ["dense", pytest.param("experts", marks=pytest.mark.slow), "next"])
def test_drafts_change_no_token(name: str) -> None:
    """Accepted ones and rejected ones, with prefix hits that end at snapshots."""
    target = CONFIGS[name]()
    layer: Any = random_prediction(target)
    with torch.no_grad():  # both follow the last token most, so that drafts are often right
        target.decoder.embed_tokens.weight.mul_(10)
        layer.mtp.fc.weight[:, :96].copy_(torch.eye(96))
        layer.mtp.fc.weight[:, 96:] *= 0.1
        for key, weight in (*target.named_parameters(), *layer.named_parameters()):
            if any(part in key for part in ("o_proj", "out_proj", "down_proj")):
                weight *= 0.2
    llm = LLM(
        model=target, device="cpu", block_size=16, num_blocks=40, num_snapshots=2, speculate=MTP(layer=layer, k=3),
        max_num_seqs=4, max_num_batched_tokens=80, max_model_len=200, draft_length="fixed",
    )  # fmt: skip
    long = [(5 * i + 2) % 91 for i in range(130)]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    sequences = []
    for _ in range(2):
        sequences += [llm.add(prompt, params)[0] for prompt in (long, long[:21], [*long[:70], 1, 2])]
        while llm.has_work:
            llm.step()
    for seq in sequences:
        assert seq.output_ids == alone(target, None, seq.token_ids[: seq.prompt_len], params)[0].output_ids
    stats = llm.stats()
    assert min(stats["num_accepted"], stats["num_states_loaded"]) > 0
    assert stats["num_drafted"] > stats["num_accepted"]


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    """Qwen's config.json does not always say whether there is one."""
    values = Qwen3_5Text.tiny()
    del values["mtp_num_hidden_layers"]
    (folder,) = write_checkpoints(tmp_path, {"model": values}).values()
    with pytest.raises(ValueError, match=r"hold no mtp\.\*: the layer of multi-token prediction is missing"):
        LLM(folder, device="cpu", tokenizer=ByteTokenizer(), speculate=MTP())
    (folder / "config.json").write_text(json.dumps(values | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="MTP: Qwen3_5Text has no layer of multi-token prediction"):
        LLM(folder, device="cpu", tokenizer=ByteTokenizer(), speculate=MTP())
