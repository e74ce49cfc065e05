"""Qwen3.5 on an NVIDIA GPU: schedules of tests/engine/test_delta_states.py with heads of the real size, in bf16."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mock_model import Oracle, record
from schedules import compare
from test_delta_states import lively

from whorl import nn
from whorl.bench.random_config import PRESETS
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model

pytestmark = pytest.mark.gpu

VOCABULARY, LONGEST = 5000, 1400
CONFIG = PRESETS["Qwen3.5-0.8B"]["text_config"] | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "vocab_size": VOCABULARY,
    "linear_num_value_heads": 32,
}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    yield lively(random_model(CONFIG, device="cuda", dtype=torch.bfloat16, max_length=4096))
    torch.cuda.empty_cache()


def engine(model: Any, **changes: Any) -> LLM:
    settings = {"max_num_seqs": 1, "num_blocks": 120, "max_model_len": LONGEST, "use_prefix_cache": False}
    return LLM(model=model, device="cuda", **{**settings, **changes})


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    common = [rng.randrange(VOCABULARY) for _ in range(1100)]
    made = []
    for shared in (0, 63, 64, 300, 640, 1100):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
        params = SamplingParams(max_tokens=150, temperature=1.0, seed=shared, ignore_eos=True)
        made.append((common[:shared] + own, params))
    return made


def finished(llm: LLM, prompts: list[tuple[list[int], SamplingParams]]) -> list[tuple[Any, Any]]:
    recorded = record(llm)
    sequences = [llm.add(*request)[0] for request in prompts]
    while llm.has_work:
        llm.step()
    return [(seq, recorded[seq.id]) for seq in sequences]


def test_logits_do_not_depend_on_the_schedule(model: Any) -> None:
    """With graphs and without, hits, preemptions, drafts accepted and rejected, two snapshots; then in a trainer."""
    made = requests()
    plain = [finished(engine(model, use_graphs=False), [request])[0] for request in made]
    texts, seen = [seq.token_ids for seq, _ in plain], Counter[str]()
    for drafted, use_graphs, num_blocks, chunk in (
        (False, True, 120, 777),
        (True, True, 400, 130),
        (True, False, 120, 2000),
        (False, False, 130, 70),
    ):
        llm = engine(
            model,
            use_prefix_cache=True,
            max_num_seqs=6,
            num_snapshots=2,
            snapshot_tokens=128,
            num_blocks=num_blocks,
            max_num_batched_tokens=chunk,
            use_graphs=use_graphs,
            speculate=Oracle(texts, k=5, wrong=4) if drafted else None,
            draft_length="fixed",
        )
        for _ in range(2):
            for (seq, logits), (expected, expected_logits) in zip(finished(llm, made), plain, strict=True):
                compare(expected, expected_logits, seq, logits)
        seen += Counter(llm.stats()) + Counter(num_rejected=llm.num_drafted - llm.num_accepted)
    for event in ("num_preemptions", "num_states_loaded", "num_tokens_hit", "num_accepted", "num_rejected"):
        assert seen[event] > 0, seen
    scored = engine(model).generate(
        texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), progress=False
    )
    with torch.no_grad():
        trained = model.logprobs(nn.pack(texts, "cuda"))
    assert [each.logprob for output in scored for each in output.prompt_logprobs] == trained.tolist()


def test_the_state_matters(model: Any) -> None:
    made = requests()[3]
    texts = []
    for forgets in (False, True):
        llm = engine(model, run_ahead=False)
        (seq,) = llm.add(made[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        llm.step()
        if forgets and llm.runner.states is not None:
            llm.runner.states.clear(seq.lane)
        while llm.has_work:
            llm.step()
        texts.append(seq.output_ids)
    assert texts[0] != texts[1]
