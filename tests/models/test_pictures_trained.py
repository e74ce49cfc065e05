"""Vision models under autograd, with pictures in packed sequences: gradients are those of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import close
from torch import Tensor
from vision import IMAGE, MERGE, expand, hf_inputs, item, save

from whorl import nn
from whorl.engine.weights import load_model
from whorl.models.glm4v import Glm4v
from whorl.models.llama import Llama
from whorl.models.qwen2_vl import Qwen2VL
from whorl.models.qwen3_vl import Qwen3VL
from whorl.positions import multimodal_positions

pytest.importorskip("transformers")

CONFIGS = {
    "qwen2-vl": Qwen2VL.tiny(),
    "qwen2.5-vl": Qwen2VL.tiny(model_type="qwen2_5_vl"),
    "qwen3-vl": Qwen3VL.tiny(),
    "glm4v": Glm4v.tiny(),
}
TEXT = [5, 81, 2, 44, 13, 7, 60, 9]
# Grids of pictures among tokens; the second sequence has text alone.
PROMPTS: list[list[Any]] = [[*TEXT, (1, 4, 16), 3, 4, (1, 6, 4), 8, 11], [7, *TEXT], [(1, 2, 2), 5, 17, 9]]


def load(name: str, folder: Path) -> tuple[Any, Any]:
    theirs = save(folder, CONFIGS[name])
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return theirs, load_model(folder, device="cpu", dtype="float32", progress=False)


def prompts(model: Any) -> list[tuple[list[int], list[Any]]]:
    values = model.config.vision.patch_values
    return [
        expand([part if isinstance(part, int) else item(i, part, values=values) for part in parts])
        for i, parts in enumerate(PROMPTS)
    ]


def packed(model: Any, device: str = "cpu") -> nn.Packed:
    positions, pictures = [], []
    for ids, items in prompts(model):
        tokens = torch.tensor(ids)
        grids = torch.tensor([each.grid for each in items]) if items else None
        positions.append(multimodal_positions(tokens[None], model.config.position_rule, image_grid_thw=grids)[0][:, 0])
        places = (tokens == IMAGE).nonzero().flatten().split([math.prod(each.grid) // MERGE**2 for each in items])
        pictures.append(
            [
                nn.Picture(patches=torch.from_numpy(each.patches), grid=each.grid, tokens=place)
                for each, place in zip(items, places, strict=True)
            ]
        )
    return nn.pack([ids for ids, _ in prompts(model)], device, positions=positions, pictures=pictures)


def theirs_of(model: Any, prompt: Any) -> Tensor:
    inputs = hf_inputs([prompt])
    ids = inputs["input_ids"]
    return model(**inputs).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_transformers(name: str, tmp_path: Path) -> None:
    """Of every parameter of the text model and of the tower."""
    theirs, ours = load(name, tmp_path)
    ours.tower.encode(torch.zeros(64, ours.config.vision.patch_values), (1, 4, 16))  # fills caches, as a server does
    expected = torch.cat([theirs_of(theirs, prompt) for prompt in prompts(ours)])
    actual = nn.trainable(ours).logprobs(packed(ours))
    close(actual.detach(), expected.detach(), 2e-5)
    weights = torch.linspace(0.5, 1.5, len(expected))
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # what a file's tensors go to are then views of gradients
    seen = set()
    for source, slot in nn.destinations(ours).items():
        names = (source, f"model.{source}", source.replace("model.", "model.language_model.", 1))
        (known,) = {each for each in names if each in gradients}
        for part in slot.parts:
            close(part.into, gradients[known][part.index], 2e-4)
        seen.add(known)
    assert seen == {each for each, gradient in gradients.items() if gradient is not None}
    assert any(".visual." in each for each in seen)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_numbers_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """Bit for bit: the log-probabilities of a prompt with pictures."""
    from whorl.engine.llm import LLM
    from whorl.engine.sequence import SamplingParams

    _, ours = load(name, tmp_path)
    llm = LLM(model=ours, device="cpu", max_num_seqs=4, block_size=4, num_blocks=200)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    scores: list[float] = []
    for ids, media in prompts(ours):
        sequence = llm.add(ids, params, media=media)[0]
        while llm.has_work:
            llm.step()
        scores += [each.logprob for each in sequence.prompt_logprobs]
    assert ours.logprobs(packed(ours)).tolist() == scores


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    picture = nn.Picture(patches=torch.zeros(4, 96), grid=(1, 2, 2), tokens=torch.tensor([1]))
    with pytest.raises(ValueError, match="pictures are of 1 sequences, expected 2"):
        nn.pack([[1, 2], [3]], "cpu", pictures=[[picture]])
    with pytest.raises(ValueError, match="tokens reach from 1 to 1 of 1 tokens"):
        nn.pack([[3]], "cpu", pictures=[[picture]])
    with pytest.raises(ValueError, match=r"positions are \[\[3, 1\]\], sequences have \[2\] tokens"):
        nn.pack([[3, 4]], "cpu", positions=[torch.zeros(3, 1)])
    text: Any = Llama(Llama.config_class.from_hf(Llama.tiny()))
    with pytest.raises(ValueError, match="Llama takes no pictures"):
        text.inserted(nn.pack([[3, 4]], "cpu", pictures=[[picture]]))
    _, ours = load("qwen3-vl", tmp_path)
    two = nn.Picture(patches=torch.zeros(4, 96), grid=(1, 2, 2), tokens=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="has 1 tokens, expected 2"):
        ours.inserted(nn.pack([[3, 4]], "cpu", pictures=[[two]]))
