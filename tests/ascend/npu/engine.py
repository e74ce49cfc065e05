"""Runs in a process of its own: the engine on an NPU of paper beside the engine on the CPU. Writes what it finds.

usage: python engine.py OUT.json FOLDER MODEL:KIND ...

Models are written to FOLDER and loaded from there by both, as a user loads them. Requests meet everything a schedule
may bring: prompts in chunks, prefixes that are in the cache, sequences that give way, drafts, samples, penalties.
"""

import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401 - registers the npu operators
from attention_kernels import IN_PLACE, KERNELS
from batch_invariant_kernels import KERNELS as BATCH_INVARIANT
from batch_invariant_kernels import OPERATOR, coarse_attention
from checkpoints import write_checkpoints
from kernels import KERNELS as ROW_WISE
from limits import refusing
from mock_model import ByteTokenizer, Logits, record
from moe_kernels import KERNELS as MOE
from safetensors.torch import load_file, save_file
from sparse_kernels import KERNELS as SPARSE
from standin import there_is_an_npu
from training_kernels import KERNELS as FULL_ATTENTION
from vision import END, IMAGE, START, VIDEO, item

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.speculate.mtp import MTP
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import load_model
from whorl.models.deepseek import DeepSeek
from whorl.models.gpt_oss import GptOss
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_vl import Qwen3VL
from whorl.ops import _op

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "vocab_size": 264, "dtype": "bfloat16"}
SIZES |= {"max_position_embeddings": 512}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": Llama.tiny(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    "qwen3": Qwen3.tiny(**SIZES, num_attention_heads=4, num_key_value_heads=1) | {"head_dim": 128},
    "window": Qwen3.tiny(**SIZES, use_sliding_window=True, sliding_window=150, max_window_layers=1) | {"head_dim": 64},
    "experts": Qwen3.tiny(**SIZES, num_experts=8, moe_intermediate_size=64, norm_topk_prob=True) | {"head_dim": 64},
}
CONFIGS["gpt_oss"] = GptOss.tiny(
    **SIZES | {"intermediate_size": 128}, num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=150
)
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
CONFIGS["qwen3_5"] = Qwen3_5Text.tiny(
    **SIZES,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=128,
    rope_parameters=SECTIONS | {"mrope_section": [12, 10, 10], "partial_rotary_factor": 0.5},
)
VISION = Qwen3VL.tiny(
    {"hidden_size": 144, "intermediate_size": 160},  # heads of 72 channels, as the published ones
    **SIZES,
    num_attention_heads=4,
    num_key_value_heads=1,
    rope_parameters=SECTIONS,
)
CONFIGS["vision"] = VISION | {"text_config": VISION["text_config"] | {"head_dim": 128}}
# As wide as the operators take; 1 / sqrt(8 * 128) is a power of two: rounding the weights to bf16 changes no choice.
LATENT: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
LATENT |= {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT |= {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 96, "moe_intermediate_size": 64}
LATENT |= {"n_group": 2, "topk_group": 1}
CONFIGS["deepseek"] = DeepSeek.tiny(**SIZES, **LATENT, num_nextn_predict_layers=1)
CONFIGS["deepseek_v3"] = DeepSeek.tiny(**SIZES, **LATENT, model_type="deepseek_v3")
ALL_KERNELS = ROW_WISE | MOE | KERNELS | IN_PLACE | FULL_ATTENTION | SPARSE
NPU_KERNELS = {name: refusing(name, kernel) for name, kernel in (ALL_KERNELS | BATCH_INVARIANT).items()}
COARSE = {f"{OPERATOR}_batch_invariant": refusing(OPERATOR, coarse_attention)}
SLOW = ("torch reference runs", "every product unpacks")
OPTIONS: dict[str, dict[str, Any]] = {"qwen3_5": {"max_num_batched_tokens": 160}}  # chunks of 128, beside others
CYCLE = 12  # tokens that follow one another in a circle


def main(out: Path, folder: Path, cases: list[str]) -> None:
    results: dict[str, Any] = {}
    paths = write_checkpoints(folder, CONFIGS)
    for path in paths.values():
        give_margins(path / "model.safetensors")
    for what in cases:
        model, kind = what.split(":")
        chosen = [(*request, []) for request in requests(is_crowded=kind == "crowded")]
        chosen = with_pictures(chosen) if model == "vision" else chosen
        results[what] = compare(paths[model], KINDS[kind] | OPTIONS.get(model, {}), chosen)
        if kind == "batch_invariant":
            results[what]["same_bits"] = same_bits(paths[model], chosen)
    out.write_text(json.dumps(results, indent=1))


def give_margins(path: Path) -> None:
    """Mostly token t + 1 follows token t, so that rounding decides no token and prompt lookup has something to find.

    Scores are spread, so that a query sees a few keys and misses the one that is not there.
    """
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("q_norm.weight", "q_proj.weight")):
            weight *= 2
        if name.endswith(("_proj.bias", "_proj_bias")):  # equal numbers, of which every token has the same
            weight *= 0.05
        if name.endswith("eh_proj.weight"):  # of token and state, the token says more
            weight[:, : len(weight)].add_(torch.eye(len(weight)))
            weight[:, len(weight) :] *= 0.1
    embedding = next(weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
    head = weights["lm_head.weight"]
    embedding *= 2 * embedding.shape[1] ** 0.5
    ids = torch.arange(len(head))
    before = ids - 1 + CYCLE * (ids % CYCLE == 0)
    head += embedding[before.clamp_max(len(head) - 1)] / 20
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, path)  # so that scales are bf16, too


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "crowded": {"num_blocks": 4, "max_num_batched_tokens": 70, "speculate": lambda *_: PromptLookup(k=9, min_hist=4)},
    "lookup": {"speculate": lambda *_: PromptLookup(k=6, min_hist=4)},
    "draft_model": {"speculate": lambda device, path: draft_model(device, path)},
    "mtp": {"speculate": lambda *_: MTP(k=2)},
    "w8a8": {"quantize": "w8a8"},
    "w4a16": {"quantize": "w4a16"},
    "batch_invariant": {},
}


def draft_model(device: str, path: Path) -> DraftModel:
    model = load_model(path, device=device, dtype=torch.bfloat16, progress=False)
    return DraftModel(model=model, tokenizer=ByteTokenizer(), k=3, device=device, memory=8 << 20)


def requests(is_crowded: bool) -> list[tuple[list[int], SamplingParams]]:
    """Longer than one block of 128, equal for more than one, ending just below a block's end, and short.

    is_crowded: two that need three blocks each in the end, where there are four.
    """
    tokens = torch.randint(240, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    circle = [i % CYCLE for i in range(400)]
    greedy = {"temperature": 0, "ignore_eos": True}
    if is_crowded:
        return [(circle[at : at + 120], SamplingParams(max_tokens=140, **greedy)) for at in (0, 5)]
    return [
        (tokens[:300], SamplingParams(max_tokens=12, **greedy)),
        (tokens[:270] + circle[:20], SamplingParams(max_tokens=12, **greedy)),
        (circle[:125], SamplingParams(max_tokens=16, **greedy)),
        (tokens[100:225], SamplingParams(max_tokens=16, logprobs=2, repetition_penalty=1.1, **greedy)),
        (tokens[7:10], SamplingParams(max_tokens=12, temperature=0.7, top_k=20, top_p=0.9, seed=5, ignore_eos=True)),
        (tokens[:300] + circle[:5], SamplingParams(max_tokens=8, prompt_logprobs=0, **greedy)),
    ]


def with_pictures(chosen: list[Any]) -> list[Any]:
    """The same with a picture, or a video of two frames, behind the first tokens of long prompts."""
    picture, video = item(0, (1, 8, 8)), item(1, (2, 4, 8), "video")
    requests = []
    for number, (prompt, params, _) in enumerate(chosen):
        text = [1 if token in (IMAGE, VIDEO, START, END) else token for token in prompt]
        if len(text) < 20:
            requests.append((text, params, []))
        elif number == 2:
            frames = [START, *[VIDEO] * 8, END, 7, START, *[VIDEO] * 8, END]
            requests.append((text[:9] + frames + text[9:], params, [video]))
        else:
            requests.append((text[:9] + [START, *[IMAGE] * 16, END] + text[9:], params, [picture]))
    return requests


def compare(path: Path, options: dict[str, Any], chosen: list[Any]) -> dict[str, Any]:
    on_cpu = generate(path, "cpu", chosen, **{n: v for n, v in options.items() if n != "num_blocks"})
    _op._WARNED.clear()
    with there_is_an_npu(NPU_KERNELS) as npu, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on_npu = generate(path, "npu", chosen, **options)
    return {
        "tokens": (on_npu["tokens"], on_cpu["tokens"]),
        "difference": difference(on_npu["logits"], on_cpu["logits"]),
        "called": dict(npu.called),
        "num_reads": npu.num_reads,
        "fallbacks": sorted({str(w.message) for w in warned if any(text in str(w.message) for text in SLOW)}),
        "block_size": on_npu["block_size"],
        "stats": on_npu["stats"],
        "cached": on_npu["cached"],
    }


def same_bits(path: Path, chosen: list[Any]) -> list[bool]:
    """Whether each request has the same logits alone as among the others, where none of its prompt is cut or reused."""
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 8, "use_prefix_cache": False}
    with there_is_an_npu(NPU_KERNELS | COARSE):
        together = generate(path, "npu", chosen, **options)["logits"]
        apart = [generate(path, "npu", [request], **options)["logits"][0] for request in chosen]
    return [
        mine.keys() == theirs.keys() and all(torch.equal(mine[i], theirs[i]) for i in mine)
        for mine, theirs in zip(together, apart, strict=True)
    ]


def generate(path: Path, device: str, chosen: list[Any], speculate: Any = None, **options: Any) -> dict[str, Any]:
    if speculate is not None:
        options |= {"speculate": speculate(device, path), "draft_length": "fixed"}
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 400, "memory": 8 << 20}
    llm = LLM(path, tokenizer=ByteTokenizer(), device=device, dtype=torch.bfloat16, **settings | options)
    logits = record(llm)
    sequences = [llm.add(prompt, params, media=media)[0] for prompt, params, media in chosen]
    while llm.has_work:
        llm.step()
    return {
        "tokens": [seq.output_ids for seq in sequences],
        "logits": [{place: row.cpu() for place, row in logits[seq.id].items()} for seq in sequences],
        "block_size": llm.pool.block_size,
        "stats": llm.stats(),
        "cached": [seq.num_cached for seq in sequences],
    }


def difference(actual: list[Logits], expected: list[Logits]) -> dict[str, float]:
    """Of the logits at the same places, in units of their own spread; and what tells the highest from the next."""
    pairs = [(mine[i], theirs[i]) for mine, theirs in zip(actual, expected, strict=True) for i in mine if i in theirs]
    errors = [((mine - theirs).square().mean().sqrt() / theirs.std()).item() for mine, theirs in pairs]
    gaps = [torch.sub(*theirs.topk(2).values).item() for _, theirs in pairs]
    return {
        "typical": statistics.median(errors),
        "worst": max(errors),
        "gap": min(gaps),
        "count": len(pairs),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
