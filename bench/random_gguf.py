"""GGUF files of a model's shape with random weights, which whorl and llama.cpp both load: for `bench.llama_cpp`.

    python -m bench.random_gguf qwen3-0.6b OUT.gguf

The tokenizer is that of the default model: prompts of `bench.llama_cpp` are ids.
"""

from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType as Kind

from whorl.engine.weights import resolve

COMMON = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "context_length": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "block_count": 28,
        "embedding_length": 1024,
        "feed_forward_length": 3072,
        "attention.head_count": 16,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
    },
    # As OLMoE-1B-7B with half its width and layers: 64 experts, 8 of them for each token.
    "small-moe": {
        "block_count": 8,
        "embedding_length": 1024,
        "feed_forward_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "expert_count": 64,
        "expert_used_count": 8,
        "expert_feed_forward_length": 512,
    },
}
BLOCK = {Kind.Q4_K: (256, 144, (0, 2)), Kind.Q6_K: (256, 210, (208,))}  # values, bytes, where fp16 numbers are


def random_matrix(kind: Kind, *shape: int, seed: int) -> np.ndarray:
    """Return blocks of random codes; `shape` ends with rows and columns."""
    values, size, halves = BLOCK[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    scale = 1 / (shape[-1] ** 0.5 * 300)  # of a code times a sub-block's scale
    for first in halves:
        blocks[..., first : first + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(shape: str, out: Path) -> None:
    """Write the file. Attention's values and half of the down projections are Q6_K, as in Q4_K_M."""
    values, reader = SHAPES[shape], gguf.GGUFReader(resolve(None))
    arch = "qwen3moe" if "expert_count" in values else "qwen3"
    writer = gguf.GGUFWriter(out, arch)
    for key, value in (COMMON | values).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    for name, stored in reader.fields.items():
        if name.startswith("tokenizer."):
            form = stored.types[0]
            part = stored.types[-1] if form == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, stored.contents(), form, sub_type=part)
    width, inner, dim = values["embedding_length"], values["feed_forward_length"], values["attention.key_length"]
    heads, kv_heads = values["attention.head_count"], values["attention.head_count_kv"]
    vocabulary = next(each.shape[-1] for each in reader.tensors if each.name == "token_embd.weight")
    seeds = iter(range(10**6))

    def add(name: str, kind: Kind, *size: int) -> None:
        writer.add_tensor(f"{name}.weight", random_matrix(kind, *size, seed=next(seeds)), raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", Kind.Q6_K, int(vocabulary), width)
    norm("output_norm", width)
    for layer in range(values["block_count"]):
        at, kind = f"blk.{layer}", Kind.Q6_K if layer % 2 else Kind.Q4_K
        for name, size in (("attn_norm", width), ("ffn_norm", width), ("attn_q_norm", dim), ("attn_k_norm", dim)):
            norm(f"{at}.{name}", size)
        add(f"{at}.attn_q", Kind.Q4_K, heads * dim, width)
        add(f"{at}.attn_k", Kind.Q4_K, kv_heads * dim, width)
        add(f"{at}.attn_v", kind, kv_heads * dim, width)
        add(f"{at}.attn_output", Kind.Q4_K, width, heads * dim)
        if num := values.get("expert_count"):
            inner = values["expert_feed_forward_length"]
            router = np.random.default_rng(next(seeds)).normal(size=(num, width), scale=width**-0.5)
            writer.add_tensor(f"{at}.ffn_gate_inp.weight", router.astype(np.float32))
            add(f"{at}.ffn_gate_exps", Kind.Q4_K, num, inner, width)
            add(f"{at}.ffn_up_exps", Kind.Q4_K, num, inner, width)
            add(f"{at}.ffn_down_exps", kind, num, width, inner)
            continue
        add(f"{at}.ffn_gate", Kind.Q4_K, inner, width)
        add(f"{at}.ffn_up", Kind.Q4_K, inner, width)
        add(f"{at}.ffn_down", kind, width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")], out: Annotated[Path, typer.Argument()]
) -> None:
    write(shape, out)


if __name__ == "__main__":
    app()
