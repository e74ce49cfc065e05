"""A small DeepSeek-V3 and its layer of multi-token prediction, trained together to answer with text that lies here.

The prompts are those of `whorl bench decode --classify`, the answers paragraphs of the documentation, letter by letter.
The model is transformers', and so is the layer inside the further one. Eight layers cost eight times the further one,
so that a draft is cheap beside a step.
"""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from whorl.bench.classify import PROMPTS
from whorl.models.deepseek import DeepSeek
from whorl.titan.served_files import describer

DOCS = Path(__file__).parents[2] / "docs"
END = 256
LENGTH = 192  # of a prompt and its answer
NUM_LAYERS = 8
CONFIG = DeepSeek.tiny(
    model_type="deepseek_v3",
    vocab_size=257,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=NUM_LAYERS,
    num_nextn_predict_layers=1,
    first_k_dense_replace=NUM_LAYERS + 1,
    initializer_range=0.06,
)


def answers(count: int) -> list[str]:
    """Paragraphs of words, one from each page that has a long one."""
    excerpts = []
    for page in sorted(DOCS.glob("*.md")):
        paragraphs = [" ".join(each.split()) for each in page.read_text().split("\n\n")]
        excerpts += [each[:120] for each in paragraphs if re.match(r"[A-Za-z ,.;:()'-]{120}", each)][:1]
    assert len(excerpts) >= count, f"{len(excerpts)} pages with a paragraph of words"
    return excerpts[:count]


def lessons() -> Tensor:
    """[lessons, LENGTH] bytes."""
    questions = [text for texts in PROMPTS.values() for text in texts]
    rows = []
    for prompt, answer in zip(questions, answers(len(questions)), strict=True):
        row = [*f"{prompt} {answer}".encode()][: LENGTH - 1]
        rows.append(row + [END] * (LENGTH - len(row)))
    return torch.tensor(rows)


class Further(nn.Module):
    """By the names that the layer has in checkpoints."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.block = DeepseekV3DecoderLayer(config, NUM_LAYERS)
        norms = (DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.enorm, self.hnorm, self.norm = norms
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Any) -> Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)
        return self.norm(self.block(self.eh_proj(joined), position_embeddings=rotary))  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        names = {"norm.weight": "shared_head.norm.weight"}
        tensors = {names.get(name, name.removeprefix("block.")): x for name, x in self.state_dict().items()}
        return {f"model.layers.{NUM_LAYERS}.{name}": x for name, x in tensors.items()}


def cross_entropy(logits: Tensor, tokens: Tensor, ahead: int) -> Tensor:
    """Of the token `ahead` of each."""
    return nn.functional.cross_entropy(logits[:, : LENGTH - ahead].flatten(0, 1), tokens[:, ahead:].flatten())


def train(folder: Path, steps: int) -> list[float]:
    """A checkpoint of the pair after so many steps, each over all lessons. The losses of both at the end."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    further, tokens = Further(model.config), lessons()
    weights = [*model.parameters(), *further.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    positions = torch.arange(LENGTH)[None]
    losses: list[Tensor] = []
    for _ in range(steps):
        hidden = model.model(tokens).last_hidden_state
        embedded = model.model.embed_tokens(tokens.roll(-1, 1))
        guessed = further(hidden, embedded, model.model.rotary_emb(hidden, positions))
        losses = [cross_entropy(model.lm_head(h), tokens, i) for i, h in enumerate((hidden, guessed), 1)]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    describer(CONFIG, is_bytes=True, assets=Path())(folder)
    tensors = {name: x.contiguous() for name, x in (model.state_dict() | further.tensors()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return [float(loss.detach()) for loss in losses]
