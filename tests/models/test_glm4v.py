"""GLM-4.1V, GLM-4.5V and GLM-4.6V against transformers on random tiny checkpoints: tower, logits, greedy answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import record
from one_sequence import close
from safetensors.torch import load_file, save_file
from vision import item
from vision_engine import pair

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import load_model
from whorl.media import MediaItem
from whorl.models.glm4v import Glm4v, Glm4vMoe

pytest.importorskip("transformers")

CONFIGS = {
    "glm4v": Glm4v.tiny(),
    "glm46v": Glm4v.tiny(model_type="glm46v"),
    "glm4v-moe": Glm4vMoe.tiny(),
    "glm4v odd": Glm4v.tiny(
        {"depth": 2, "num_heads": 4, "patch_size": 8, "image_size": 24, "attention_bias": True}, num_key_value_heads=1
    ),
}
FIRST = ("glm4v", "glm4v-moe")
IMAGE, START, END, VIDEO_START, VIDEO_END = 101, 103, 104, 105, 106
TEXT = [5, 81, 2, 44, 13, 7, 60, 9]
ITEMS: dict[str, tuple[Any, ...]] = {
    "wide": ("image", (1, 4, 16)),
    "tall": ("image", (1, 14, 6)),
    "small": ("image", (1, 2, 2)),
    "clip": ("video", (3, 4, 2)),
}
PROMPTS: dict[str, list[Any]] = {
    "text": TEXT,
    "one picture": [*TEXT, "wide", 3, 4],
    "several": [1, "tall", 2, "small", "wide", *TEXT],
    "video": [9, "clip", *TEXT],
    "mixed": [*TEXT, "wide", 3, "clip", 5, "tall", 7, "clip", 1],
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Prompt:
    """Tokens and items of a prompt; a video's frames have the placeholders of images, between two tokens."""

    def __init__(self, model: Any, name: str) -> None:
        self.ids: list[int] = []
        self.types: list[int] = []
        self.items: list[MediaItem] = []
        for part in PROMPTS[name]:
            if isinstance(part, int):
                self._add([part])
                continue
            kind, grid = ITEMS[part]
            self.items.append(item(list(ITEMS).index(part), grid, kind, values=model.config.vision.patch_values))
            count = grid[1] * grid[2] // 4
            self._add([VIDEO_START] if kind == "video" else [])
            for frame in range(grid[0]):
                self._add([START])
                self._add([IMAGE] * count, 2 if kind == "video" else 1)
                self._add([END, *([60 + frame] if kind == "video" else [])])
            self._add([VIDEO_END] if kind == "video" else [])

    def _add(self, ids: list[int], kind: int = 0) -> None:
        self.ids += ids
        self.types += [kind] * len(ids)

    def inputs(self) -> dict[str, Any]:
        """What transformers takes."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([self.ids])}
        inputs |= {"attention_mask": torch.ones(1, len(self.ids)), "mm_token_type_ids": torch.tensor([self.types])}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if chosen := [each for each in self.items if each.kind == kind]:
                inputs[pixels] = torch.cat([torch.from_numpy(each.patches) for each in chosen])
                inputs[grids] = torch.tensor([each.grid for each in chosen])
        return inputs


@pytest.fixture(scope="module", params=[n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' model and ours, of one checkpoint."""
    return pair(CONFIGS[request.param], tmp_path_factory.mktemp("vl"))


def serve(model: Any, prompts: list[Prompt], **options: Any) -> tuple[list[Any], dict[int, Any]]:
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "block_size": 4, "num_blocks": 300}
    llm = LLM(model=model, **settings | options)
    logits = record(llm)
    sequences = [llm.add(prompt.ids, GREEDY, media=prompt.items)[0] for prompt in prompts]
    while llm.has_work:
        llm.step()
    return sequences, logits


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 6, 16), (1, 14, 10), (3, 4, 6)])
def test_features_are_transformers(both: tuple[Any, Any], grid: tuple[int, int, int]) -> None:
    theirs, ours = both
    patches = torch.from_numpy(item(5, grid, "video", values=ours.config.vision.patch_values).patches)
    with torch.inference_mode():
        expected = theirs.model.visual(patches, torch.tensor([[1, *grid[1:]]] * grid[0]))
    (features,) = ours.tower.encode(patches, grid)
    close(features, expected.pooler_output)


# transformers takes no pictures beside videos, whose frames have the same placeholders.
@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "mixed"])
def test_logits_and_answers_are_transformers(both: tuple[Any, Any], name: str) -> None:
    theirs, ours = both
    prompt = Prompt(ours, name)
    (seq,), logits = serve(ours, [prompt])
    count = GREEDY.max_tokens
    options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    with torch.inference_mode():
        out = theirs.generate(**prompt.inputs(), do_sample=False, **options)
        first = theirs(**prompt.inputs()).logits[0, -1]
    assert seq.output_ids == out[0, len(prompt.ids) :].tolist()
    close(logits[seq.id][0], first, 2e-5)


def test_bits_do_not_depend_on_the_way(both: tuple[Any, Any]) -> None:
    """Alone, together, in chunks, with drafts, and with a prefix that is cached."""
    _, ours = both
    prompts = [Prompt(ours, name) for name in ("text", "several", "mixed")]
    alone = [serve(ours, [prompt], use_prefix_cache=False) for prompt in prompts]
    lookup = PromptLookup(k=4, min_hist=1, guard=False)
    for way in ({}, {"max_prompt_tokens": 7}, {"speculate": lookup, "draft_length": "fixed"}):
        sequences, logits = serve(ours, [*prompts, *prompts], **way)
        for i, seq in enumerate(sequences):
            (expected,), bits = alone[i % len(prompts)]
            assert seq.output_ids == expected.output_ids
            assert all(torch.equal(logits[seq.id][place], row) for place, row in bits[expected.id].items())


def test_gate_and_up_in_one_tensor_are_shared_by_ranks(tmp_path: Path) -> None:
    theirs, whole = pair(CONFIGS["glm4v"], tmp_path)
    halves: list[Any] = [
        load_model(tmp_path, device="cpu", progress=False, tp=nn.Ranks(rank=rank, size=2)) for rank in range(2)
    ]
    full = whole.decoder.layers[1].mlp.gate_up_proj.weight
    assert torch.equal(full, theirs.model.language_model.layers[1].mlp.gate_up_proj.weight)
    gates, ups = zip(*(half.decoder.layers[1].mlp.gate_up_proj.weight.chunk(2) for half in halves), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), full)


def test_gate_and_up_in_one_tensor_may_be_quantised(tmp_path: Path) -> None:
    """FP8 in blocks: scales of both halves are one tensor, too, and each rank has its rows of both."""
    pair(CONFIGS["glm4v"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith("mlp.gate_up_proj.weight")]:
        scales = torch.rand(tensors[name].shape[0] // 8, tensors[name].shape[1] // 8) + 0.5
        codes = tensors[name].to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = codes.float() * scales.repeat_interleave(8, 0).repeat_interleave(8, 1)
    others = sorted(n.removesuffix(".weight") for n in tensors if n.endswith(".weight") and "gate_up_proj" not in n)
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": others}
    settings["modules_to_not_convert"] += ["self_attn", "visual"]
    folders = []
    for name, values, config in (
        ("packed", tensors, CONFIGS["glm4v"] | {"quantization_config": settings}),
        ("plain", plain, CONFIGS["glm4v"]),
    ):
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        folders.append(tmp_path / name)
    for ranks in (None, nn.Ranks(rank=1, size=2)):
        models: list[Any] = [load_model(folder, device="cpu", progress=False, tp=ranks) for folder in folders]
        weights = [model.decoder.layers[0].mlp.gate_up_proj for model in models]
        assert torch.equal(weights[0].format.values(weights[0]), weights[1].weight)


WRONG: dict[str, Any] = {
    "text_config.model_type is 'llama', expected glm4v_text": lambda c: c["text_config"].update(model_type="llama"),
    "out_hidden_size is 64, expected the text's hidden_size, 48": lambda c: c["vision_config"].update(
        out_hidden_size=64
    ),
    "hidden_act is 'gelu', expected silu": lambda c: c["vision_config"].update(hidden_act="gelu"),
    "image_size is 2, expected at least the 4 pixels": lambda c: c["vision_config"].update(image_size=2),
    "image_token_id is 'x'": lambda c: c.update(image_token_id="x"),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_model_is_refused(message: str) -> None:
    config = json.loads(json.dumps(Glm4v.tiny()))
    WRONG[message](config)
    with pytest.raises(ValueError, match=message):
        Glm4v.config_class.from_hf(config)


def test_what_makes_no_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="expected groups of equal size, a topk_group of at most n_group"):
        Glm4vMoe.config_class.from_hf(Glm4vMoe.tiny(n_group=3))
