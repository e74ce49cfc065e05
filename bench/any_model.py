"""`python -m bench.any_model`: a model by its own file, by transformers' code in the engine, and by transformers alone.

Decoding and a prompt of one model are timed: native, with --backend transformers, and by transformers' own generate.
Then tiny random models of many families run on the device: what they decode among others must have the bits of the same
tokens in a prompt, alone and in chunks. Prints each result as it comes, a table at the end, and JSON with --json.
"""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from whorl import device as devices
from whorl.bench import decode, decode_peer
from whorl.bench.decode_engine import DecodeSettings
from whorl.bench.options import DecodeOptions
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document, provenance
from whorl.bench.report import table
from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model

app = typer.Typer(add_completion=False)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 100}),
    "granite": ("GraniteForCausalLM", {"residual_multiplier": 0.5}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 100}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 100, "head_dim": 64}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 100}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "moe_intermediate_size": 128}),
    "olmoe": ("OlmoeForCausalLM", EXPERTS),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
}
PARAMS = SamplingParams(max_tokens=48, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)


def decoded(output: Output) -> list[float]:
    return [each.logprob for each in output.logprobs or ()]


def is_one_arithmetic(model: Any, device: str) -> bool:
    """Return whether tokens have the same bits decoded among others, in a prompt, and alone in chunks."""
    sizes: dict[str, Any] = {"device": device, "num_blocks": 256, "max_model_len": 512}
    llm = LLM(model=model, **sizes)
    prompts = [[(7 * i + 3 * n) % 997 + 3 for i in range(n)] for n in (1, 5, 33, 200)]
    outputs = llm.generate(prompts, PARAMS, progress=False)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for output in outputs:
        (again,) = llm.generate([output.prompt_ids + output.token_ids], scored, progress=False)
        if decoded(output) != [each.logprob for each in again.prompt_logprobs[len(output.prompt_ids) - 1 :]]:
            return False
    alone = LLM(model=model, **sizes, max_num_seqs=1, max_num_batched_tokens=37)
    (output,) = alone.generate([prompts[3]], PARAMS, progress=False)
    return (output.token_ids, decoded(output)) == (outputs[3].token_ids, decoded(outputs[3]))


def check_families(names: list[str], device: str, dtype: torch.dtype) -> dict[str, str]:
    """Return for each family what was seen: "equal bits", "other bits", or the error."""
    results = {}
    for name in names:
        architecture, changes = FAMILIES[name]
        config = {"architectures": [architecture], "model_type": name, **SIZES, **IDS, **changes}
        try:
            model = random_model(config, device=device, dtype=dtype)
            results[name] = "equal bits" if is_one_arithmetic(model, device) else "other bits"
        except Exception as error:  # the others are still of interest
            results[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        print(f"{name:12} {results[name]}", flush=True)
    return results


def time_ways(settings: DecodeSettings, *, compiled: bool) -> Iterator[Document]:
    """Yield a row for each way and batch, in tokens per second."""
    native = decode.run(settings)
    yield from _rows("whorl, its own file", native)
    through = replace(settings, engine=settings.engine.changed(backend="transformers"))
    yield from _rows("whorl, transformers' code", decode.run(through))
    with Progress(len(settings.rows) * 2 + 1) as progress:
        peer = decode_peer.run(settings, native, progress, compiled=compiled)
    for row in (*peer["peers"], peer["peer_prefill"]):
        yield _row(row["label"], row)


def _rows(way: str, document: Document) -> list[Document]:
    return [_row(way, row) for row in (*document["decode"], document["prefill"])]


def _row(way: str, row: Document) -> Document:
    what = f"decode, batch {row['batch']}" if "batch" in row else "prompt"
    return {"way": way, "what": what, "tok_s": row.get("tok_s"), "note": row.get("note", "")}


def _cells(row: Document) -> list[str]:
    return [row["way"], row["what"], row["note"] or f"{row['tok_s']:.1f}"]


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A shape for random weights, as of whorl bench decode.")] = "Qwen3-0.6B",
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,16,64",
    tokens: Annotated[int, typer.Option(help="Timed steps.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the timed prompt.")] = 2048,
    repeats: Annotated[int, typer.Option(help="Timed repetitions, of which the median counts.")] = 5,
    compiled: Annotated[bool, typer.Option(help="Time transformers' compiled steps, too.")] = True,
    families: Annotated[str, typer.Option(help="Families to check, or none.")] = ",".join(FAMILIES),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Time one model in three ways, then check families for one arithmetic."""
    device: Any = devices.default_device()
    dtype: Any = "float32" if devices.accelerator(device) is None else "bfloat16"
    options = DecodeOptions(random_config=model, batch=batch, tokens=tokens, prompt_tokens=prompt_tokens)
    settings = DecodeSettings.resolve(None, options, EngineSettings(device=device, dtype=dtype))
    rows = []
    for row in time_ways(replace(settings, repeats=repeats), compiled=compiled):
        rows.append(row)
        print(*_cells(row), sep=" | ", flush=True)
    names = [] if families == "none" else families.split(",")
    results = check_families(names, device, getattr(torch, dtype))
    print("\n".join(["", *table([["way", "what", "tokens/s"], *map(_cells, rows)])]))
    if json_path is not None:
        document = {**provenance(device), "model": model, "dtype": dtype, "families": results, "rows": rows}
        json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
