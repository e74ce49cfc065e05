"""`SamplingParams(drafts=False)`: a sequence without drafts beside others that have them, with the same tokens."""

from serving import told

from whorl import SamplingParams
from whorl.engine.drafting import DraftOptions


def test_a_sequence_without_drafts_has_the_same_tokens() -> None:
    llm = told({"again": "to be or not to be or not to be or not to be"}, speculate=DraftOptions(pld=True).lookup())
    prompt = llm.tokenizer.encode("<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")  # type: ignore[union-attr]
    params = [SamplingParams(temperature=0, max_tokens=40, drafts=drafts) for drafts in (True, False)]
    drafted, plain = llm.generate([prompt, prompt], params)
    assert plain.token_ids == drafted.token_ids
    assert (plain.num_drafted, drafted.num_drafted > 0) == (0, True)
