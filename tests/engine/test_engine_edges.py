"""The engine at its edges: the last place, the last block, masks and alternatives at the end of the vocabulary."""

import numpy as np
import pytest
import torch
from mock_model import ByteTokenizer, MockModel, Oracle, Script

from whorl.engine.batch import Batch
from whorl.engine.blocks import BlockPool
from whorl.engine.call import field_offsets
from whorl.engine.llm import LLM
from whorl.engine.scheduler import Scheduler
from whorl.engine.sequence import SamplingParams, Sequence, Timings

PROMPT = list(b"once upon a time")
SIZE = len(ByteTokenizer())  # of the tokenizer; the model's vocabulary has padding behind it


def engine(model: object | None = None, **options: object) -> LLM:
    settings = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 64}
    settings |= {"draft_length": "fixed"}
    return LLM(model=model or MockModel(), tokenizer=ByteTokenizer(), **{**settings, **options})  # type: ignore[arg-type]


def one(llm: LLM, **options: object) -> Sequence:
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True} | options
    (seq,) = llm.add(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]
    while llm.has_work:
        llm.step()
    return seq


def test_tokens_behind_the_end_of_a_mask_are_not_allowed() -> None:
    model = MockModel()
    model.head[100:] *= 100  # what would be sampled is behind the mask
    mask = torch.zeros(80, dtype=torch.bool)
    mask[70:72] = True
    assert set(one(engine(model), allow=lambda _: mask).output_ids) <= {70, 71}


def test_there_are_no_more_alternatives_than_tokens() -> None:
    seq = one(engine(), logprobs=10**6)
    assert [len(logprob.top) for logprob in seq.logprobs] == [SIZE] * 6


def test_a_stop_string_ends_the_text_at_min_tokens_and_not_before() -> None:
    for min_tokens, text in ((5, "hel"), (6, "hello wor")):
        seq = one(engine(Script(len(PROMPT), b"hello worlo")), min_tokens=min_tokens, max_tokens=11, stop=("lo",))
        assert seq.text.value == text


def test_as_many_tokens_may_be_asked_for_as_fit() -> None:
    llm = engine(num_blocks=6)
    room = llm.max_model_len - len(PROMPT)
    assert one(llm, max_tokens=None, min_tokens=room).num_outputs == room
    with pytest.raises(ValueError, match=f"min_tokens is {room + 1}, expected at most {room}, the room after"):
        llm.add(PROMPT, SamplingParams(min_tokens=room + 1))


def test_blocks_of_a_rejected_draft_are_given_back() -> None:
    """At once: others wait for them."""
    told = one(engine(), max_tokens=30).token_ids
    llm = engine(speculate=Oracle([told], k=20, wrong=3))
    (seq,) = llm.add(PROMPT, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    llm.step()
    llm.step()
    assert seq.num_drafted == 20
    assert seq.num_accepted < 4
    assert llm.pool.num_used == llm.pool.blocks_for(len(seq.token_ids))


def test_copies_that_cannot_share_a_prompt_do_not_wait_for_it() -> None:
    for use_prefix_cache, running in ((True, 1), (False, 3)):
        llm = engine(use_prefix_cache=use_prefix_cache, max_num_batched_tokens=60, max_prompt_tokens=60)
        llm.add([*range(18)], SamplingParams(n=3, max_tokens=4))
        llm.step()
        assert llm.stats()["num_running"] == running


def test_what_pads_a_call_has_no_rows() -> None:
    """A recorded call is larger than the one it runs: entries behind the last one begin and end where that one ends."""
    scheduler = Scheduler(BlockPool(8, 4), max_num_seqs=4, max_num_batched_tokens=16)
    scheduler.add(Sequence([1, 2, 3], SamplingParams(), max_len=16))
    (call,) = Batch(scheduler.schedule()).calls(block_size=4, table_width=4)
    into = {name: np.full(count, 99, dtype=kind) for name, kind, _, count in field_offsets((8, 4, 4))[0]}
    call.write(into, {"slots": -1})
    assert into["query_starts"].tolist() == [0, 3, 3, 3, 3]
    assert into["context_lens"].tolist() == [3, 0, 0, 0]
    assert into["slots"].tolist() == [0, 1, 2, *[-1] * 5]


def test_speed_is_that_of_the_tokens_after_the_first() -> None:
    timings = Timings(added=0.0, first_token=2.0, finished=4.0, num_tokens=5)
    assert (timings.time_to_first_token, timings.tokens_per_second) == (2.0, 2.0)
    assert Timings(added=0.0, first_token=2.0, finished=2.0, num_tokens=1).tokens_per_second is None
