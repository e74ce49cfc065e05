"""Write a tiny checkpoint of random weights for any architecture that has a file in whorl/models.

    python examples/tiny_checkpoint.py GptOssForCausalLM /tmp/tiny
    whorl serve /tmp/tiny --device cpu                   # or: whorl generate /tmp/tiny -p "Hello"

Its tokens are bytes, so a prompt may be any text. The answer has no meaning: what can be tried is everything else, such
as the API, ranks, drafts and formats of weights. `--mxfp4` stores the experts of gpt-oss as they are published.
"""

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from whorl import models, nn
from whorl.engine.weights import random_model
from whorl.titan.served_files import END, byte_tokenizer

VOCABULARY = 272  # 256 bytes, the end of a text, and what stands for pictures
PICTURES: tuple[str, ...] = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
PICTURES += ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
# What chooses an architecture where a file has several.
CHANGES: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3"},
    "Glm46VForConditionalGeneration": {"model_type": "glm46v"},
    "Qwen2_5_VLForConditionalGeneration": {"model_type": "qwen2_5_vl"},
    "Qwen3MoeForCausalLM": {"num_experts": 4},
    "Qwen3VLMoeForConditionalGeneration": {"num_experts": 4},
    "Qwen3_5MoeForCausalLM": {"num_experts": 4},
    "Qwen3_5MoeForConditionalGeneration": {"num_experts": 4},
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def config_of(architecture: str, *, has_mxfp4: bool = False) -> dict[str, Any]:
    """Return a config.json of the architecture; ValueError for one that has no file."""
    model = models.find({"architectures": [architecture], models.BACKEND: "native"})
    config: dict[str, Any] = model.tiny(vocab_size=VOCABULARY, **CHANGES.get(architecture, {}))
    names = [name for name in PICTURES if name in config]
    config |= {name: 257 + i for i, name in enumerate(names)}
    if has_mxfp4:
        config["quantization_config"] = MXFP4
    return config | {"architectures": [architecture], "eos_token_id": 256}


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, random weights and a tokenizer of bytes into a new folder."""
    folder.mkdir(parents=True)
    model = random_model(config, device="cpu", dtype=torch.float32)
    tensors = {name: slot.tensor().contiguous() for name, slot in nn.destinations(cast(torch.nn.Module, model)).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("architecture", choices=models.ARCHITECTURES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mxfp4", action="store_true", help="experts of gpt-oss in MXFP4")
    options = parser.parse_args()
    write(options.folder, config_of(options.architecture, has_mxfp4=options.mxfp4))
    print(f"whorl serve {options.folder} --device cpu")


if __name__ == "__main__":
    main()
