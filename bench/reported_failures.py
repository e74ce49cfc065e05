"""What users of other engines have reported about batch invariance, each as a check that counts other bits: 0 passes.

`tests/exact/test_reported_failures.py` runs them on a CPU, `bench/exactness.py` on a GPU. An engine is made by `make`,
with these settings of `LLM`; all engines have the same weights.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup

Make = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=24, temperature=0, logprobs=0, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 90) for _ in range(length)]


def generate(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[Output]:
    return llm.generate(prompts, params, progress=False)


def numbers(output: Any) -> list[tuple[int, float]]:
    """The tokens of an output and their log-probabilities."""
    return [(token, each.logprob) for token, each in zip(output.token_ids, output.logprobs, strict=True)]


def different(a: Sequence[Any], b: Sequence[Any]) -> int:
    assert len(a) == len(b) > 0
    return sum(x != y for x, y in zip(a, b, strict=True))


def neighbor(make: Make) -> int:
    """Another request's prompt grows from 9 to 10 tokens while a sequence decodes (vLLM #51902)."""
    seen = []
    for length in (9, 10):
        llm = make()
        [seq] = llm.add(prompt(0, 40), GREEDY)
        for _ in range(6):
            llm.step()
        llm.add(prompt(1, length), GREEDY)
        while llm.has_work:
            llm.step()
        seen.append([(token, each.logprob) for token, each in zip(seq.output_ids, seq.logprobs, strict=True)])
    return different(*seen)


def cache_hit(make: Make) -> int:
    """A prompt whose beginning is cached, against a cold run (vLLM #40896, #46592, #55868)."""
    llm, cold, long = make(), make(use_prefix_cache=False), prompt(2, 64)
    generate(llm, [long[:50]])
    [warm], [expected] = generate(llm, [long]), generate(cold, [long])
    assert warm.num_cached > 0
    assert expected.num_cached == 0
    return different(numbers(warm), numbers(expected))


def full_hit(make: Make) -> int:
    """A prompt that is cached but for one token, through the experts (vLLM #57092)."""
    llm, long = make(), prompt(3, 65)
    [first] = generate(llm, [long])
    [again] = generate(llm, [long])
    assert again.num_cached == 64
    return different(numbers(first), numbers(again))


def speculation(make: Make) -> int:
    """Drafts on and off (vLLM #54506, #52522)."""
    text = prompt(4, 8) * 5
    [drafted] = generate(make(speculate=PromptLookup(k=4, min_hist=0), draft_length="fixed"), [text])
    [plain] = generate(make(), [text])
    assert drafted.num_drafted > 0
    return different(numbers(drafted), numbers(plain))


def many(make: Make) -> int:
    """44 sequences at once, against each alone (vLLM #51187, #48391)."""
    prompts = [prompt(100 + i, 5 + i % 30) for i in range(44)]
    crowd = generate(make(max_num_seqs=44), prompts)
    alone = make(max_num_seqs=1)
    return sum(different(numbers(crowd[i]), numbers(*[generate(alone, [prompts[i]])[0]])) for i in range(0, 44, 4))


def experts(make: Make) -> int:
    """Experts of one token, among the tokens of others' prompts (vLLM #57016)."""
    [alone] = generate(make(), [prompt(5, 1)])
    among = generate(make(), [prompt(5, 1), *(prompt(200 + i, 60) for i in range(7))])
    return different(numbers(alone), numbers(among[0]))


FAILURES: dict[str, Callable[[Make], int]] = {
    "a neighbor's prompt grows from 9 to 10 tokens": neighbor,
    "prefix cache: a hit against a cold run": cache_hit,
    "a full hit: one token through the experts": full_hit,
    "speculation on and off": speculation,
    "44 sequences against each alone": many,
    "fused experts: one token among prompts": experts,
}
