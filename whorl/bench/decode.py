"""`whorl bench decode`: times decoding and prefill of the whole engine against the roofline and, optionally, a peer."""

import statistics
from typing import Any

from whorl.bench import classify, decode_peer, decode_profile, decode_report
from whorl.bench.decode_engine import (
    DecodeSettings,
    count_experts,
    engine,
    expert_figures,
    free,
    header,
    load,
    median_time,
    placeholders,
    prompts,
    speeds,
    start,
    time_steps,
)
from whorl.bench.options import DecodeOptions
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark
from whorl.engine.drafting import DraftOptions
from whorl.engine.llm import LLM
from whorl.engine.roofline import prompt_flops, step_bytes
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.settings import EngineSettings
from whorl.timing import matmul_rate


def benchmark(
    model: str | None, options: DecodeOptions, engine_settings: EngineSettings, drafting: DraftOptions
) -> Benchmark:
    """Return the benchmark that the options select; raises ValueError for options that conflict."""
    settings = DecodeSettings.resolve(model, options, engine_settings)
    if options.classify:
        return classify.benchmark(settings, model, drafting)
    if options.profile:
        return decode_profile.benchmark(settings)
    return Benchmark(run=lambda: run(settings), render=decode_report.render)


def run(settings: DecodeSettings) -> Document:
    """Return {"header": ..., "decode": [...], "prefill": ..., "peers": [...], "peer_prefill": ...}.

    The last two are of the library that `settings.peer` names, if any.
    """
    num_rows, has_prefill = len(settings.rows), bool(settings.prompt_tokens)
    peer_rows = 0 if settings.peer is None else num_rows * 2 + has_prefill
    with Progress(2 + num_rows + has_prefill + peer_rows) as progress:
        with progress(f"weights of {settings.name}"):
            model, tokenizer = load(settings)
        with progress("copy bandwidth"):
            document: Document = {"header": header(settings, model)}
        vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        document |= {"decode": [], "prefill": None}
        for context, batch in settings.rows:
            with progress(f"decode, batch {batch}, {context} keys"):
                document["decode"].append(_decode(model, vocab_size, batch, context, settings))
        if has_prefill:
            with progress(f"prefill of {settings.prompt_tokens}"):
                document["prefill"] = _prefill(model, vocab_size, settings)
        del model
        free(settings.device)
        document |= {"peers": [], "peer_prefill": None}
        if settings.peer is not None:
            document |= decode_peer.run(settings, document, progress)
    return document


def _decode(model: Any, vocab_size: int, batch: int, context: int, settings: DecodeSettings) -> Document:
    """Time steps in which `batch` sequences decode, through `LLM.step`; returns a row of the table."""
    free(settings.device)  # the previous row may have had a large cache
    llm, num = engine(model, batch, context, settings), settings.num_tokens

    def started() -> list[Sequence]:
        return start(llm, vocab_size, batch, context, num)

    seconds = statistics.median([time_steps(llm, started(), num) for _ in range(settings.repeats + 1)][1:])
    distinct = count_experts(llm, started, num)  # the same prompts once more
    sizes: dict[str, Any] = {"context": context + num // 2, "kv_cache_dtype": settings.engine.kv_cache_dtype}
    needed = step_bytes(model, batch=batch, distinct=distinct, **sizes)
    return {
        "batch": batch,
        "context": context,
        **speeds(batch, needed, seconds, settings.device),
        **expert_figures(model, batch, distinct),
    }


def _prefill(model: Any, vocab_size: int, settings: DecodeSettings) -> Document:
    length = settings.prompt_tokens
    llm = LLM(
        model=model,
        settings=settings.engine,
        max_num_seqs=1,
        max_num_batched_tokens=min(length, 8192),
        max_prompt_tokens=min(length, 8192),  # a prompt is not split to keep steps short
        max_model_len=length + 1,
        num_blocks=settings.num_blocks(model, length + 1),
        use_prefix_cache=False,
    )
    (prompt,) = prompts(1, length, vocab_size, placeholders(model))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seconds = median_time(settings.device, lambda: llm.generate(prompt, params, progress=False), 3)
    rate, matmul = prompt_flops(model, length) / seconds, matmul_rate(model.dtype, settings.device)
    return {
        "prompt_tokens": length,
        "seconds": seconds,
        "tok_s": length / seconds,
        "tflop_s": rate / 1e12,
        "matmul_tflop_s": matmul / 1e12,
        "share_of_matmul": rate / matmul,
    }
