"""New weights and sleep over two ranks: each rank keeps its shard, and what fails on one of them counts for all."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer
from safetensors.torch import load_file, save_file

from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams, WeightsError
from whorl.engine.weights.update import UpdateError
from whorl.models.qwen3 import Qwen3

PROMPT = [(7 * i + 3) % 89 + 1 for i in range(13)]
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 64, "max_num_seqs": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"num_hidden_layers": 2},
    "tied": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "experts": {"num_hidden_layers": 2, "num_experts": 4},
}
Tensors = dict[str, torch.Tensor]
Make = Callable[..., LLM]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[LLM] = []

    def made(path: Path, **changes: Any) -> LLM:
        for llm in engines:  # a process has one group of ranks at a time
            llm.close()
        engines.append(LLM(path, tp=2, tokenizer=ByteTokenizer(), **OPTIONS, **changes))  # type: ignore[arg-type]
        return engines[-1]

    yield made
    for llm in engines:
        llm.close()


def checkpoint(tmp_path: Path, name: str) -> Path:
    return write_checkpoints(tmp_path, {name: Qwen3.tiny(hidden_size=64, **CONFIGS[name])})[name]


def changed(path: Path) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path / "model.safetensors")
    return {n: t + (0.05 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in tensors.items()}


def rewritten(path: Path, tensors: Tensors) -> Path:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def said(llm: LLM) -> tuple[Any, ...]:
    output: Output
    (output,) = llm.generate([PROMPT], GREEDY, progress=False)
    return output.token_ids, output.logprobs, output.prompt_logprobs


def stacked(tensors: Tensors, layers: int = 2, experts: int = 4) -> Tensors:
    """The same weights with all experts of a layer in one tensor, as transformers has them in memory."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors[f"{prefix}.{e}.{n}_proj.weight"] for e in range(experts)] for n in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        out |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_new_weights_are_those_of_an_engine_that_had_them_from_the_start(
    name: str, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whorl.engine import rank_updates

    monkeypatch.setattr(rank_updates, "_AT_ONCE", 20_000)  # several messages
    path = checkpoint(tmp_path, name)
    llm, tensors = make(path), changed(path)
    old, told = load_file(path / "model.safetensors"), said(llm)
    assert llm.update_weights(tensors.items(), version="new") == llm.weight_version == "new"
    now = said(llm)
    llm.update_weights(stacked(old).items() if name == "experts" else old.items())
    assert said(llm) == told
    llm.sleep(1)
    llm.wake()
    llm.resume()
    assert said(llm) == told
    llm.sleep(2)
    llm.wake()
    with pytest.raises(WeightsError):
        llm.resume()
    llm.update_weights(tensors.items())
    llm.resume()
    assert said(llm) == now != told
    assert said(make(rewritten(path, tensors))) == now


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, make: Make) -> None:
    """A value that does not fit float16 lies in the rows of rank 1 only: rank 0 has nothing to complain of."""
    path = checkpoint(tmp_path, "dense")
    llm, tensors = make(path, dtype="float16"), changed(path)
    told = said(llm)
    with pytest.raises(UpdateError, match=r"1 of another shape: model\.norm"):
        llm.update_weights((tensors | {"model.norm.weight": torch.ones(3)}).items())
    assert said(llm) == told  # refused before any of it was sent
    wrong = {name: tensor.clone() for name, tensor in tensors.items()}
    wrong["model.layers.1.mlp.up_proj.weight"][-1] = 1e6
    with pytest.raises(UpdateError, match=r"rank 1 failed: .*up_proj.weight: values of torch.float32 do not fit"):
        llm.update_weights(wrong.items())
    with pytest.raises(WeightsError, match="the weights are incomplete"):
        llm.generate([PROMPT], GREEDY, progress=False)
    with pytest.raises(UpdateError, match=r"1 tensors are missing: model\.norm"):
        llm.update_weights((n, t) for n, t in tensors.items() if n != "model.norm.weight")
    llm.update_weights(tensors.items())
    now = said(llm)
    assert now == said(make(rewritten(path, tensors), dtype="float16")) != told
