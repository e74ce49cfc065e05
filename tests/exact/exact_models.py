"""Stock models of transformers, and the engine with their weights, for the tests of whorl.exact."""

from collections.abc import Sequence
from typing import Any

import torch
from test_one_arithmetic import engine
from transformers_models import build

from whorl import exact
from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model

FAMILIES = ("llama", "qwen3", "qwen3_moe")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARAMS = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
# Wide enough that torch sums a row alone and a row among others in different orders.
SIZES = {"hidden_size": 96, "intermediate_size": 160}


def stock(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of transformers, in training mode."""
    routing = {"num_experts": 8, "num_experts_per_tok": 2} if family == "qwen3_moe" else {}
    return build(family, **{**SIZES, **routing, **changes}).to(dtype).train()


def serving(hf: Any) -> LLM:
    """The engine for a model of transformers, with random weights."""
    values = hf.config.to_dict() | {"architectures": [type(hf).__name__]}
    return engine(random_model(values, device="cpu", dtype=next(hf.parameters()).dtype))


def give(llm: LLM, hf: Any, version: str) -> None:
    """Give the engine the model's weights."""
    llm.update_weights(((name, each.detach()) for name, each in hf.named_parameters()), version=version)


def prompts(seed: int, lengths: Sequence[int] = (1, 5, 12, 21)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def sampled(llm: LLM, seed: int = 0, **changes: Any) -> list[Output]:
    return llm.generate(prompts(seed), SamplingParams(**{**PARAMS, "seed": seed, **changes}), progress=False)


def sequences(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.prompt_ids + output.token_ids for output in outputs]


def scores(hf: Any, outputs: Sequence[Output], version: str, **options: Any) -> exact.Scores:
    """What the trainer computes for the tokens of outputs."""
    values = exact.sequence_logprobs(hf, sequences(outputs), **options)
    return exact.Scores(
        token_ids=[output.token_ids for output in outputs],
        logprobs=[each[len(output.prompt_ids) - 1 :] for each, output in zip(values, outputs, strict=True)],
        versions=(version,),
    )
