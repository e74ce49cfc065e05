"""Towers of vision families beside transformers, and gpt-oss, on a GPU: checks first, then times.

    python bench/trials/families.py          # everything, in about six minutes
    python bench/trials/families.py towers   # 16 pictures of 1008 x 1008 (1024 x 1024 for patches of 16) a tower
    python bench/trials/families.py bits     # gpt-oss, part by part: which of them has other bits
    python bench/trials/families.py decode   # gpt-oss-20b and -120b: one sequence and 64, with 4096 keys each

Prints one JSON document a line. A tower is right if its error against fp64 is at most twice transformers' own.
"""

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl import LLM, SamplingParams, nn, ops
from whorl.bench.decode_engine import median_time
from whorl.bench.random_config import read_config
from whorl.engine.weights import random_model
from whorl.models import glm4v_tower, qwen2_vl_tower
from whorl.models.vision_tower import VisionTower
from whorl.nn.weights.dense import ALL_DENSE

DEVICE, COUNT = "cuda", 16
GRID, TRIED = (1, 72, 72), (1, 24, 40)  # patches of a picture of 1008 x 1008 pixels; of one that fp64 computes as well


# ---- towers


def towers() -> list[tuple[str, VisionTower, Any]]:
    """Each tower at its published sizes, and transformers' class of the same config."""
    from transformers.models.glm4v import modeling_glm4v as glm
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as windowed
    from transformers.models.qwen2_vl import modeling_qwen2_vl as plain

    kinds: list[tuple[str, Any, Any, dict[str, Any], Any]] = [
        ("Qwen2-VL", qwen2_vl_tower.Tower, qwen2_vl_tower.TowerConfig, {}, plain.Qwen2VisionTransformerPretrainedModel),
        (
            "Qwen2.5-VL",
            qwen2_vl_tower.WindowedTower,
            qwen2_vl_tower.WindowedTowerConfig,
            {"hidden_size": 1280},
            windowed.Qwen2_5_VisionTransformerPretrainedModel,
        ),
        ("GLM-4V", glm4v_tower.Tower, glm4v_tower.TowerConfig, {}, glm.Glm4vVisionModel),
    ]
    made = []
    for name, tower_class, config_class, values, peer_class in kinds:
        tower = tower_class(config_class.from_hf(values))
        with torch.device(DEVICE):
            nn.create_parameters(tower, ALL_DENSE, torch.bfloat16)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for _, layer in nn.weighted(tower):
            layer.randomize(generator)
        config = peer_class.config_class(**values)
        config._attn_implementation = "sdpa"
        with torch.device(DEVICE):
            peer = peer_class._from_config(config, dtype=torch.bfloat16).eval()
        peer.load_state_dict({name: slot.into for name, slot in nn.destinations(tower).items()})
        made.append((name, tower, peer))
    return made


def patches(tower: VisionTower, grid: tuple[int, int, int]) -> Tensor:
    return torch.randn(grid[1] * grid[2], tower.config.patch_values, device=DEVICE)


def theirs(peer: Any, x: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
    with torch.inference_mode():
        features: Tensor = peer(x.to(next(peer.parameters()).dtype), torch.tensor(grids, device=DEVICE)).pooler_output
    return features


def time_tower(name: str, tower: VisionTower, peer: Any) -> None:
    x = patches(tower, TRIED)
    exact = theirs(copy.deepcopy(peer).double(), x, [TRIED])
    features = tower.encode(x, TRIED)[0], theirs(peer, x, [TRIED])
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in features]
    inputs = [(patches(tower, GRID), GRID) for _ in range(COUNT)]
    joined = torch.cat([x for x, _ in inputs])
    alone = [tower.encode(*picture) for picture in inputs[:4]]

    def ours() -> None:
        for first in range(0, COUNT, 4):  # as many as the engine runs at once
            tower.encode_all(inputs[first : first + 4])

    seconds = median_time(DEVICE, ours, 5)
    peer_seconds = median_time(DEVICE, lambda: theirs(peer, joined, [GRID] * COUNT), 5)
    row = {
        "tower": name,
        "is_right": errors[0] <= 2 * errors[1] + 1e-6,
        "errors": errors,
        "alone_equals_together": all(map(torch.equal, alone, tower.encode_all(inputs[:4]))),
        "ms": 1e3 * seconds,
        "transformers_ms": 1e3 * peer_seconds,
        "times_faster": peer_seconds / seconds,
    }
    print(json.dumps(row), flush=True)


def time_towers() -> None:
    for tower in towers():
        time_tower(*tower)
        gc.collect()
        torch.cuda.empty_cache()


# ---- gpt-oss


def attend(sequences: Tensor, queries: int, keys: int, window: int, *, has_sinks: bool) -> Tensor:
    """Attention of gpt-oss: the last `queries` of `keys` tokens, of two sequences; [2, queries, heads, 64].

    sequences: q, k and v of the tokens. With at most 16 queries they are decoded, with more they are a prompt.
    """
    block, tokens = 16, sequences[:, -keys:]
    q, k, v = tokens[..., :64, :], tokens[..., 64:72, :], tokens[..., 72:80, :]
    pages = -(-keys // block)
    caches = torch.zeros(2, 2, pages * block, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    caches[0, :, :keys], caches[1, :, :keys] = k, v
    caches = caches.view(2, 2 * pages, block, 8, 64)
    tables = torch.arange(2 * pages, device=DEVICE, dtype=torch.int32).view(2, pages)
    starts = torch.arange(3, device=DEVICE, dtype=torch.int32) * queries
    lengths = torch.full((2,), keys, device=DEVICE, dtype=torch.int32)
    sinks = torch.linspace(-2, 4, 64, device=DEVICE) if has_sinks else None
    last = q[:, -queries:].flatten(0, 1).contiguous()
    y = ops.paged_attention(last, *caches, tables, starts, lengths, sinks=sinks, scale=64**-0.5, window=window)
    return y.unflatten(0, (2, queries))


def attention_bits() -> dict[str, bool]:
    """Decoded queries against those of a prompt, and one sequence against two."""
    equal = {}
    for keys in (100, 128, 129, 1000, 5000, 40000):
        tokens = torch.randn(2, keys, 80, 64, device=DEVICE, dtype=torch.bfloat16)
        for window, has_sinks in ((0, True), (128, True), (0, False)):
            prompt = attend(tokens, min(keys, 300), keys, window, has_sinks=has_sinks)
            name = f"attention, {keys} keys, window {window}{', sinks' if has_sinks else ''}"
            for queries in (1, 5):
                decoded = attend(tokens, queries, keys, window, has_sinks=has_sinks)
                equal[f"{name}, {queries} decoded"] = torch.equal(decoded, prompt[:, -queries:])
    return equal


def expert_bits(model: Any) -> dict[str, bool]:
    """Packed experts against their plain values, and each number of tokens against the most."""
    experts = model.decoder.layers[0].mlp.experts
    (up, up_values), (down, down_values) = (
        (stack, stack.format.values(stack)) for stack in (experts.gate_up_proj, experts.down_proj)
    )
    biases = experts.gate_up_bias, experts.down_bias
    most = 4096
    x = torch.randn(most, 2880, device=DEVICE, dtype=torch.bfloat16)
    weights, ids = ops.route(torch.randn(most, 32, device=DEVICE), 4)

    def run(kind: str, tokens: int) -> Tensor:
        stacks: tuple[Tensor | None, ...] = (up_values, None, biases[0], down_values, None, biases[1])
        if kind == "packed":
            stacks = (up.codes, up.scales, biases[0], down.codes, down.scales, biases[1])
        return ops.clipped_experts(x[:tokens], *stacks, weights[:tokens], ids[:tokens], backend="triton")

    equal, whole = {}, {kind: run(kind, most) for kind in ("packed", "plain")}
    for tokens in (1, 5, 16, 17, 64, 65, 128, 129, 512, 513, most):
        some = {kind: run(kind, tokens) for kind in whole}
        equal[f"experts, {tokens} tokens, packed = plain"] = torch.equal(some["packed"], some["plain"])
        for kind, y in whole.items():
            equal[f"experts, {tokens} tokens, {kind}, few = many"] = torch.equal(some[kind], y[:tokens])
    return equal


def layer_bits(model: Any) -> dict[str, bool]:
    """The products with a bias, and the choice of experts: each number of tokens against the most."""
    layer = model.decoder.layers[0]
    router, equal = layer.mlp.router, {}
    x = torch.randn(2048, 2880, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.randn(5120, 2880, device=DEVICE, dtype=torch.bfloat16) * 2880**-0.5
    bias = torch.randn(5120, device=DEVICE, dtype=torch.bfloat16)
    whole, routed, product = router(x), ops.route(router(x), 4), ops.linear(x, wide, bias)
    for tokens in (1, 5, 16, 17, 64, 65, 200):
        logits = router(x[:tokens])
        equal[f"router, {tokens} tokens"] = torch.equal(logits, whole[:tokens])
        chosen = zip(ops.route(logits, 4), routed, strict=True)
        equal[f"choices, {tokens} tokens"] = all(torch.equal(some, all_[:tokens]) for some, all_ in chosen)
        equal[f"linear with a bias, {tokens} tokens"] = torch.equal(
            ops.linear(x[:tokens], wide, bias), product[:tokens]
        )
    return equal


def model_bits(model: Any) -> dict[str, bool]:
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 8192, (n,), generator=draw).tolist() for n in (3, 40, 700, 2100)]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    llm = LLM(model=model, device=DEVICE, num_blocks=2000, max_num_seqs=8)
    batch = llm.generate(prompts, params, progress=False)
    alone = [llm.generate([prompt], params, progress=False)[0] for prompt in prompts]
    scored, equal = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), {}
    for one, among in zip(alone, batch, strict=True):
        name = f"model, prompt of {len(one.prompt_ids)}"
        decoded = [each.logprob for each in one.logprobs]
        equal[f"{name}, batch"] = decoded == [each.logprob for each in among.logprobs]
        (again,) = llm.generate([one.prompt_ids + one.token_ids], scored, progress=False)
        sent_back = [each.logprob for each in again.prompt_logprobs[len(one.prompt_ids) - 1 :]]
        equal[f"{name}, answer sent back"] = decoded == sent_back
    return equal


def check_bits() -> None:
    """Few layers of gpt-oss-20b, whose experts are real in size: each part by itself, then the engine. Says what
    differs."""
    torch.manual_seed(0)
    config = read_config("gpt-oss-20b") | {"num_hidden_layers": 4, "vocab_size": 8192, "max_position_embeddings": 8192}
    model: Any = random_model(config, device=DEVICE, dtype=torch.bfloat16)
    parts: dict[str, Callable[[], dict[str, bool]]] = {
        "attention": attention_bits,
        "experts": lambda: expert_bits(model),
        "products": lambda: layer_bits(model),
        "model": lambda: model_bits(model),
    }
    for name, part in parts.items():
        equal = part()
        row = {
            "is_right": all(equal.values()),
            "compared": len(equal),
            "differ": [k for k, v in equal.items() if not v],
        }
        print(json.dumps({"gpt-oss bits": name, **row}), flush=True)


def time_decode() -> None:
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        command = [sys.executable, "-m", "whorl", "bench", "decode", "--random-config", name, "--batch", "1,64"]
        command += ["--context", "4096", "--tokens", "64", "--repeats", "3", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout or json.dumps({"decode": name, "error": done.stderr[-2000:]}), flush=True)


PARTS = {"towers": time_towers, "bits": check_bits, "decode": time_decode}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
