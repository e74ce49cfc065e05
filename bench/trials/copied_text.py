"""Prompt lookup on text that copies its prompt: how much is accepted, and what that is worth at a GPU's costs.

    python bench/trials/copied_text.py      # the default model on the CPU; costs from bench/results/drafts_h200.json

Every answer must equal that of plain decoding. The gain is the tokens over the sum of the steps' costs, in plain steps
of the model that was measured: what that model would gain if it accepted as much.
"""

import json
from pathlib import Path

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup

COSTS = Path(__file__).parents[1] / "results" / "drafts_h200.json"
TEXT = (
    "The river Elbe rises in the Krkonose Mountains and flows through Bohemia and Germany to the North Sea. "
    "Its total length is 1094 kilometres. Its major tributaries include the Vltava, the Saale, the Havel and the Mulde."
)
CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sizes must not be negative")
    return width * height"""
FRUIT = ["apple", "banana", "cherry", "orange", "grape", "melon", "plum", "pear", "peach", "kiwi", "mango", "lemon"]
QUESTIONS = [
    f"Repeat this text word for word:\n\n{TEXT}",
    f"Correct the spelling of this text and return all of it:\n\n{TEXT.replace('Mountains', 'Mountians')}",
    f"Copy this code exactly:\n\n```python\n{CODE}\n```",
    "Write this list again, unchanged:\n" + "\n".join(f"{i}. {name}" for i, name in enumerate(FRUIT, 1)),
]


def answer(llm: LLM, question: str) -> tuple[list[int], list[int]]:
    """Return the tokens of an answer, and the length of the draft of each step."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    (seq,) = llm.add(prompt, SamplingParams(temperature=0, max_tokens=90))
    drafts = []
    while llm.has_work:
        before = llm.num_drafted
        llm.step()
        drafts.append(llm.num_drafted - before)
    return seq.output_ids, drafts[1:]  # the first step computes the prompt


def main() -> None:
    plain = LLM(device="cpu", num_blocks=128)
    expected = [answer(plain, question)[0] for question in QUESTIONS]
    rows = json.loads(COSTS.read_text())["Qwen3-30B-A3B"]["rows"]
    costs = {row["k"]: row["times"] for row in rows}
    for k in (3, 8):
        llm = LLM(device="cpu", num_blocks=128, speculate=PromptLookup(k=k), draft_length="fixed")
        answers = [answer(llm, question) for question in QUESTIONS]
        assert [tokens for tokens, _ in answers] == expected
        for question, (tokens, drafts) in zip(QUESTIONS, answers, strict=True):
            cost = sum(next(costs[n] for n in sorted(costs) if n >= length) for length in drafts)
            gain = (len(tokens) - 1) / cost
            print(f"k {k}, {question.split(':')[0]!r}: {len(tokens)} tokens in {len(drafts)} steps, gain {gain:.2f}")
        share = llm.num_accepted / llm.num_drafted
        print(f"k {k}: {llm.num_accepted} of {llm.num_drafted} drafted tokens accepted, {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
