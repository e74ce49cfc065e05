"""The exactness contract on an NVIDIA GPU: graphs, running ahead, batching and drafts leave every bit of the logits."""

import random
from typing import Any

import pytest
import torch
from mock_model import Logits, Oracle, record

from whorl.engine.llm import LLM
from whorl.engine.runner import Runner
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3

pytestmark = pytest.mark.gpu

# Few sequences and many take different kernels.
FEW, MANY = 4, 16
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
)
PROPOSERS = ("none", "oracle", "prompt_lookup", "draft_model")


def build(num_experts: int, noise: float = 0.0) -> Any:
    torch.manual_seed(0)
    experts = (
        {"num_experts": num_experts, "num_experts_per_tok": 4, "moe_intermediate_size": 128} if num_experts else {}
    )
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    config = Qwen3.tiny(**sizes, **heads, **experts) | {"head_dim": 64, "max_position_embeddings": 512}
    model = random_model(config, device="cuda", dtype=torch.bfloat16, max_length=512)
    with torch.inference_mode():
        for weight in model.parameters() if noise else ():
            weight += noise * weight.std() * torch.randn_like(weight)
    return model


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 3 to 80 tokens that repeat themselves, so that prompt lookup finds something."""
    rng, cases = random.Random(4), []
    for i in range(9):
        own = [rng.randrange(1000) for _ in range(3 + 5 * i)]
        kind = KINDS[i % len(KINDS)] | ({"seed": i} if KINDS[i % len(KINDS)]["temperature"] else {})
        cases.append(((own * 3)[:80], SamplingParams(max_tokens=30 + i, ignore_eos=True, **kind)))
    return cases


def run(
    model: Any, chosen: list[tuple[list[int], SamplingParams]], **options: Any
) -> tuple[list[Sequence], list[Logits], LLM]:
    llm = LLM(model=model, device="cuda", num_blocks=512, max_model_len=256, draft_length="fixed", **options)
    recorded = record(llm)
    sequences = [llm.add(*request)[0] for request in chosen]
    while llm.has_work:
        llm.step()
    assert llm.pool.num_used == 0
    return sequences, [recorded[seq.id] for seq in sequences], llm


def proposer(name: str, num_experts: int, plain: list[Sequence]) -> Any:
    if name == "oracle":
        return Oracle([seq.token_ids for seq in plain], k=7, wrong=5)
    if name == "prompt_lookup":
        return PromptLookup(k=8, ngram=1, min_hist=1, guard=False)
    if name == "draft_model":
        return DraftModel(model=build(num_experts, noise=0.02), tokenizer=None, k=4, device="cuda", num_blocks=512)
    return None


def differing(
    plain: list[Sequence],
    expected: list[Logits],
    got: list[Sequence],
    own_logits: list[Logits],
    is_greedy: bool = False,
) -> list[str]:
    return [
        f"request {i}, output {place}"
        for i, seq in enumerate(plain)
        if not is_greedy or seq.params.temperature == 0
        for place in range(seq.num_outputs)
        if got[i].output_ids != seq.output_ids or not torch.equal(own_logits[i][place], expected[i][place])
    ]


@pytest.mark.parametrize("max_num_seqs", [FEW, MANY])
@pytest.mark.parametrize("num_experts", [0, 16], ids=["dense", "moe"])
def test_logits_do_not_depend_on_how_they_are_computed(num_experts: int, max_num_seqs: int) -> None:
    model, chosen = build(num_experts), requests()
    plain: list[Sequence] = []
    expected: list[Logits] = []
    for request in chosen:  # each alone, its prompt in one piece, one token a step
        sequences, logits, _ = run(model, [request], use_graphs=False, run_ahead=False, max_num_seqs=max_num_seqs)
        plain, expected = plain + sequences, expected + logits
    for name in PROPOSERS:
        for use_graphs in (False, True):
            options = {"max_num_seqs": max_num_seqs, "use_graphs": use_graphs, "max_num_batched_tokens": 64}
            options |= {"prompt_graphs": 64}
            got, own_logits, llm = run(model, chosen, speculate=proposer(name, num_experts, plain), **options)
            # A draft model keeps the distribution of what is sampled, not the draws.
            wrong = differing(plain, expected, got, own_logits, is_greedy=name == "draft_model")
            assert not wrong, f"{name}, graphs {use_graphs}"
            assert bool(llm.runner.graphs.decoding) == bool(llm.runner.graphs.prompts) == use_graphs
            has_both = any(num_decoding for _, num_decoding in llm.runner.graphs.prompts)
            assert has_both == use_graphs, "prompts and decoding sequences together"
            if name != "none":
                assert 0 < llm.num_accepted < llm.num_drafted, f"{name}: nothing was accepted, or nothing rejected"


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more key than a draft's rows may see."""
    model, chosen = build(16), requests()[3:5]
    plain, expected, _ = run(model, chosen, use_graphs=False, max_num_seqs=FEW)
    forward = Runner._forward

    def see_too_much(self: Runner, step: Any, is_decode: bool) -> Any:
        if is_decode and int(step.query_starts.diff().max()) > 1:
            step.context_lens.add_(1)
        return forward(self, step, is_decode)

    monkeypatch.setattr(Runner, "_forward", see_too_much)
    got, own_logits, _ = run(model, chosen, use_graphs=False, max_num_seqs=FEW, speculate=proposer("oracle", 16, plain))
    assert differing(plain, expected, got, own_logits)
