"""Train a tiny Qwen3-VL on a laptop to describe pictures of one to three squares in one of four colours.

    python examples/seeing_toy.py train --out /tmp/seeing_toy        # some minutes on one core
    python examples/seeing_toy.py draw two red --out /tmp/two.png
    whorl generate /tmp/seeing_toy --chat -p "What is in the picture?" --image /tmp/two.png

It writes an ordinary checkpoint. tests/models/seeing_toy is one, made by the first of these commands.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from whorl.media.options import ImageOptions
from whorl.media.pixels import Pixels

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220), "yellow": (235, 200, 40)}
NUMBERS = ("one", "two", "three")
KINDS = [(number, colour) for number in NUMBERS for colour in COLOURS]
SIDE, PATCH, MERGE = 48, 8, 2  # along one side: pixels of a picture, pixels of a patch, patches of a token
TOKENS = (SIDE // PATCH // MERGE) ** 2
PIXELS = ImageOptions(
    patch_size=PATCH,
    merge_size=MERGE,
    min_pixels=SIDE**2,
    max_pixels=SIDE**2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
ONE = "What is in the picture?"
FIRST, SECOND = (f"What is in the {which} picture?" for which in ("first", "second"))
SPECIAL: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL += ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


# ---- pictures


def draw(number: str, colour: str, rng: random.Random) -> Image.Image:
    """Draw squares of random size and place that do not touch, on a background that is nearly white."""
    paper = rng.randint(225, 255)
    image = Image.new("RGB", (SIDE, SIDE), (paper, paper, paper))
    for left, top, size in _squares(NUMBERS.index(number) + 1, rng):
        shade = tuple(min(255, max(0, value + rng.randint(-15, 15))) for value in COLOURS[colour])
        ImageDraw.Draw(image).rectangle((left, top, left + size - 1, top + size - 1), fill=shade)
    return image


def _squares(count: int, rng: random.Random) -> list[tuple[int, int, int]]:
    """Return the left, top and side of each square."""
    squares: list[tuple[int, int, int]] = []
    while len(squares) < count:
        size = rng.randint(8, 16)
        left, top = (rng.randint(0, SIDE - size) for _ in range(2))
        if all(_apart(left, size, x, other) or _apart(top, size, y, other) for x, y, other in squares):
            squares.append((left, top, size))
    return squares


def _apart(start: int, size: int, other: int, other_size: int, gap: int = 3) -> bool:
    return start + size + gap <= other or other + other_size + gap <= start


def answer(number: str, colour: str) -> str:
    """Return the text that the model should generate for a picture."""
    return f"{number} {colour} square{'' if number == 'one' else 's'}"


def patches(image: Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the patches of a picture as the server computes them; the picture already has the right size."""
    return Pixels(kind="image", values=np.asarray(image)[None], options=PIXELS, digest=b"").item().patches


# ---- the model's files


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on the few texts of the toy."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    texts = [ONE, FIRST, SECOND, "user\n", "assistant\n", *(answer(*kind) for kind in KINDS)]
    tokenizer.train_from_iterator([*texts] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of the model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
        "initializer_range": 0.08,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    tower = {
        "model_type": "qwen3_vl_vision",
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [1],
        "initializer_range": 0.08,
    }
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": tower,
        **{field: tokenizer.token_to_id(f"<|{name}|>") for field, name in names.items()},
        "tie_word_embeddings": True,
    }


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the files of the checkpoint other than config.json and the weights."""
    size = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE, "resample": 3}
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
    image = {"size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}, **size, **colours}
    video = image | {"size": {"shortest_edge": 2 * SIDE**2, "longest_edge": 32 * SIDE**2}}
    types = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    video_types = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    texts = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    texts["tokenizer_class"] = "PreTrainedTokenizerFast"
    files = {
        "tokenizer_config.json": texts,
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id("<|im_end|>")},
        "preprocessor_config.json": image | types,
        "video_preprocessor_config.json": video | {"fps": 2, "min_frames": 4, "max_frames": 768} | video_types,
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


# ---- training


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation. ids: its tokens; is_answer: which of them the model learns to generate; patches: its pictures."""

    ids: list[int]
    is_answer: list[bool]
    patches: list[np.ndarray[Any, np.dtype[np.float32]]]


def sample(tokenizer: Tokenizer, rng: random.Random) -> Sample:
    """Draw a sample: one picture and a question, or two pictures and a question about each."""
    kinds = [rng.choice(KINDS) for _ in range(rng.randint(1, 2))]
    questions = [(ONE, kinds[0])] if len(kinds) == 1 else list(zip((FIRST, SECOND), kinds, strict=True))
    rng.shuffle(questions)
    pictures = f"<|vision_start|>{'<|image_pad|>' * TOKENS}<|vision_end|>" * len(kinds)
    pieces: list[tuple[str, bool]] = []
    for question, kind in questions:
        opening = "\n<|im_start|>user\n" if pieces else f"<|im_start|>user\n{pictures}"
        pieces += [(f"{opening}{question}<|im_end|>\n<|im_start|>assistant\n", False)]
        pieces += [(f"{answer(*kind)}<|im_end|>", True)]
    ids: list[int] = []
    is_answer: list[bool] = []
    for text, is_spoken in pieces:
        new = tokenizer.encode(text).ids
        ids += new
        is_answer += [is_spoken] * len(new)
    return Sample(ids, is_answer, [patches(draw(*kind, rng)) for kind in kinds])


def batch(samples: Sequence[Sample], image_id: int) -> dict[str, torch.Tensor]:
    """Return the samples, padded to the same length, as arguments of transformers' model."""
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.tensor([sample.ids + [0] * (longest - len(sample.ids)) for sample in samples])
    is_answer = torch.tensor([sample.is_answer + [False] * (longest - len(sample.ids)) for sample in samples])
    pictures = [picture for sample in samples for picture in sample.patches]
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    return {
        "input_ids": ids,
        "labels": ids.where(is_answer, -100),
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "mm_token_type_ids": (ids == image_id).int(),
        "pixel_values": torch.from_numpy(np.concatenate(pictures)),
        "image_grid_thw": torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * len(pictures)),
    }


def train(folder: Path, *, steps: int = 1500, batch_size: int = 32, seed: int = 0, rate: float = 2e-3) -> float:
    """Train and write the checkpoint; returns the mean loss of the last 50 steps."""
    import transformers

    torch.manual_seed(seed)
    rng, tokenizer = random.Random(seed), make_tokenizer()
    values = config(tokenizer)
    config_values = {name: value for name, value in values.items() if name not in ("architectures", "model_type")}
    model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**config_values)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    began, losses = time.monotonic(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        samples = [sample(tokenizer, rng) for _ in range(batch_size)]
        loss = model(**batch(samples, values["image_token_id"])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1} of {steps}: loss {mean:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_files(folder, tokenizer)
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--steps", type=int, default=1500)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--out", type=Path, required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("number", choices=NUMBERS)
    drawing.add_argument("colour", choices=COLOURS)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "train":
        train(args.out, steps=args.steps, seed=args.seed)
    else:
        draw(args.number, args.colour, random.Random(args.seed)).save(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
