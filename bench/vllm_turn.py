"""One turn of `bench.vllm_peer`, in its own process and interpreter: `vllm_turn.py SIDE FOLDER ROWS.json`.

SIDE is `whorl`, `vllm` or `vllm_invariant`; FOLDER holds a config.json. vLLM's side needs no package but vLLM. Prints
the rows as JSON.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], list[int]], float]  # prompts and tokens of each answer, to seconds
WARM = 8  # tokens before the ones that a decoding row counts


def whorl_engine(folder: str, engine: dict[str, Any]) -> Run:
    """Load random weights in whorl, warmed up as a server is."""
    from whorl import LLM, SamplingParams
    from whorl import device as devices
    from whorl.bench.decode_engine import DecodeSettings, load
    from whorl.bench.options import DecodeOptions
    from whorl.engine.settings import EngineSettings
    from whorl.engine.warmup import WarmUp, kind_for

    limits = engine | {"max_prompt_tokens": engine["max_num_batched_tokens"], "device": devices.default_device()}
    settings = EngineSettings(**limits)
    config = DecodeOptions(random_config=os.path.join(folder, "config.json"))
    model, _ = load(DecodeSettings.resolve(None, config, settings))
    llm = LLM(model=model, settings=settings, warm=False)
    for _ in WarmUp(llm, kind_for(settings.warmup, llm.runner.device, is_server=True)).run():
        pass

    def run(prompts: list[list[int]], answers: list[int]) -> float:
        begin = time.perf_counter()
        added = [
            llm.add(ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))[0]
            for ids, count in zip(prompts, answers, strict=True)
        ]
        while llm.has_work:
            llm.step()
        _check([sequence.num_outputs for sequence in added], answers)
        return time.perf_counter() - begin

    return run


def vllm_engine(folder: str, engine: dict[str, Any], is_invariant: bool) -> Run:
    """Load random weights in vLLM, as large as a trained model's: with zeros experts would be chosen alike."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")
    if is_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch
    from vllm import LLM, SamplingParams

    backend: dict[str, Any] = {"attention_config": {"backend": "FLASH_ATTN"}} if is_invariant else {}
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.92,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **engine,
        **backend,
    )

    def fill(model: torch.nn.Module) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1)
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)

    llm.apply_model(fill)

    def run(prompts: list[list[int]], answers: list[int]) -> float:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in answers]
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        spent = time.perf_counter() - begin
        _check([len(output.outputs[0].token_ids) for output in outputs], answers)
        return spent

    return run


def _check(counts: list[int], answers: list[int]) -> None:
    if counts != answers:
        raise SystemExit(f"answers have {counts} tokens; asked for {answers}")


def measure(run: Run, work: list[dict[str, Any]], vocab_size: int) -> dict[str, float]:
    """Return tokens a second of each row of work. Prompts are drawn anew each time: no prefix is in the cache."""
    draw = random.Random(7)

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [[draw.randrange(vocab_size // 150, vocab_size) for _ in range(length)] for length in lengths]

    def decode(batch: int, keys: int, tokens: int) -> float:
        short = run(prompts([keys] * batch), [WARM] * batch)
        return batch * tokens / (run(prompts([keys] * batch), [WARM + tokens] * batch) - short)

    def prefill(tokens: int) -> float:
        return tokens / run(prompts([tokens]), [1])

    def mixed(requests: int, least: int, most: int, shortest: int, longest: int) -> float:
        lengths = [draw.randint(least, most) for _ in range(requests)]
        answers = [draw.randint(shortest, longest) for _ in range(requests)]
        return sum(answers) / run(prompts(lengths), answers)

    kinds: dict[str, Callable[..., float]] = {"decode": decode, "prefill": prefill, "mixed": mixed}
    run(prompts([64]), [4])
    return {row["name"]: max(kinds[row["kind"]](*row["sizes"]) for _ in range(row["turns"])) for row in work}


if __name__ == "__main__":
    side, folder, rows = sys.argv[1:]
    with open(rows) as file:
        asked = json.load(file)
    with open(os.path.join(folder, "config.json")) as file:
        size = json.load(file)["vocab_size"]
    start = time.perf_counter()
    engine = asked["engine"]
    run = whorl_engine(folder, engine) if side == "whorl" else vllm_engine(folder, engine, side == "vllm_invariant")
    ready = time.perf_counter() - start
    print(json.dumps(measure(run, asked["work"], size) | {"ready, s": ready}))
