"""The host a step ahead of the device: ends are noticed a step late, and nothing of that shows in what comes out."""

from collections.abc import Callable

import pytest
import torch
from mock_model import EOS, ByteTokenizer, MockModel, Oracle, Script, alone, record

from whorl.engine.llm import LLM
from whorl.engine.sequence import FinishReason, SamplingParams, Sequence

PROMPT = list(b"once upon a time")


def engine(model: object | None = None, **options: object) -> LLM:
    settings = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 64}
    settings |= {"run_ahead": True, **options}
    return LLM(model=model or MockModel(), tokenizer=ByteTokenizer(), **settings)  # type: ignore[arg-type]


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(temperature=0, **more)  # type: ignore[arg-type]


def drain(llm: LLM) -> None:
    while llm.has_work:
        llm.step()


def num_decode_rows(model: MockModel) -> int:
    return sum(rows for rows, sequences in model.num_rows if rows == sequences)


def test_it_is_for_accelerators_unless_asked_for() -> None:
    assert not engine(run_ahead=None).run_ahead
    assert engine().run_ahead


def test_a_step_is_under_way_when_the_last_one_is_read() -> None:
    model = MockModel()
    llm = engine(model)
    (seq,) = llm.add(PROMPT, greedy(max_tokens=9, ignore_eos=True))
    (delta,) = llm.step()
    assert (len(delta.token_ids), seq.num_outputs, seq.num_unread) == (1, 1, 1)
    assert num_decode_rows(model) == 1  # computed from a token that the host had not seen
    assert seq.length == len(seq.token_ids) + 1
    drain(llm)
    assert num_decode_rows(model) == 8  # the length is known beforehand: nothing is computed for nothing
    assert (seq.num_unread, llm.pool.num_used) == (0, 0)


@pytest.mark.parametrize("answer", [[EOS], [*b"hello", EOS], [*b"hello world", EOS, *b"more"]])
def test_an_end_that_is_noticed_late_is_dropped(answer: list[int]) -> None:
    llm = engine(Script(len(PROMPT), answer))
    (seq,) = llm.add(PROMPT, greedy())
    deltas = []
    while llm.has_work:
        deltas += llm.step()
    assert seq.output_ids == answer[: answer.index(EOS) + 1]
    assert [t for delta in deltas for t in delta.token_ids] == seq.output_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.STOP]
    assert llm.pool.num_used == 0
    assert llm.step() == []  # what was under way for it comes to nothing
    assert seq.output_ids == answer[: answer.index(EOS) + 1]


@pytest.mark.parametrize(("stop", "text"), [(("o w",), "hell"), (("world", "lo"), "hel"), (("d",), "hello worl")])
def test_stop_strings(stop: tuple[str, ...], text: str) -> None:
    llm = engine(Script(len(PROMPT), [*b"hello world and more", EOS]))
    (seq,) = llm.add(PROMPT, greedy(stop=stop))
    pieces = []
    while llm.has_work:
        pieces += [delta.text for delta in llm.step()]
    assert "".join(pieces) == seq.text.value == text
    assert seq.finish_reason == FinishReason.STOP


def test_an_end_frees_its_lane_and_blocks_for_the_next() -> None:
    """The lane is taken again while the dropped row is under way in it."""
    model = MockModel()
    params = greedy(max_tokens=12, stop_token_ids=())
    first = alone(model, ByteTokenizer(), PROMPT, params)[0].output_ids
    llm = engine(model, max_num_seqs=1, num_blocks=7, use_prefix_cache=False)
    stop = greedy(max_tokens=12, stop_token_ids=(first[3],))
    sequences = [llm.add(prompt, stop)[0] for prompt in (PROMPT, list(b"another one"), PROMPT)]
    recorded = record(llm)
    drain(llm)
    for seq in sequences:
        prompt = seq.token_ids[: seq.prompt_len]
        plain, logits = alone(model, ByteTokenizer(), prompt, stop)
        assert seq.output_ids == plain.output_ids
        assert all(torch.equal(recorded[seq.id][i], logits[i]) for i in range(seq.num_outputs))
    assert sequences[0].num_outputs == first.index(first[3]) + 1
    assert llm.pool.num_used == 0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_abort_with_a_step_under_way(steps: int) -> None:
    model = MockModel()
    llm = engine(model)
    params = greedy(max_tokens=12, ignore_eos=True)
    gone, stays = llm.add(PROMPT, params) + llm.add(list(b"another"), params)
    for _ in range(steps):
        llm.step()
    assert gone.num_unread == 1
    num_outputs = gone.num_outputs
    llm.abort(gone)
    assert llm.pool.num_used == llm.pool.blocks_for(stays.num_computed)
    late = llm.add(list(b"late"), params)[0]
    drain(llm)
    assert (gone.num_outputs, gone.finish_reason) == (num_outputs, FinishReason.ABORT)
    for seq in (stays, late):
        assert seq.output_ids == alone(model, ByteTokenizer(), seq.token_ids[: seq.prompt_len], params)[0].output_ids
    assert llm.pool.num_used == 0


def preempted_under_way(llm: LLM) -> Callable[[], int]:
    """How many sequences were preempted while the host had not read a token of theirs."""
    preempt, count = llm.scheduler._preempt, [0]

    def counting(seq: Sequence) -> None:
        count[0] += seq.num_unread
        preempt(seq)

    llm.scheduler._preempt = counting  # type: ignore[method-assign]
    return lambda: count[0]


def test_preemption_with_a_step_under_way() -> None:
    """The token under way is kept: it was sampled before the blocks changed hands."""
    model, params = MockModel(), greedy(max_tokens=20, ignore_eos=True)
    llm = engine(model, num_blocks=8, max_num_seqs=4)
    num_preempted, recorded = preempted_under_way(llm), record(llm)
    sequences = [llm.add([i] * 5, params)[0] for i in range(6)]
    drain(llm)
    assert num_preempted() > 2
    for seq in sequences:
        plain, logits = alone(model, ByteTokenizer(), seq.token_ids[:5], params)
        assert seq.output_ids == plain.output_ids
        assert all(torch.equal(recorded[seq.id][i], logits[i]) for i in range(20))
    assert llm.pool.num_used == 0


def test_batches_that_grow_and_shrink() -> None:
    model = MockModel()
    llm = engine(model, max_num_batched_tokens=9)
    lengths, sequences = [3, 17, 1, 8, 20, 2], []
    for i, length in enumerate(lengths):
        sequences += llm.add(list(b"a prompt that is cut")[: 4 + 3 * i], greedy(max_tokens=length, ignore_eos=True))
        llm.step()
    drain(llm)
    for seq, length in zip(sequences, lengths, strict=True):
        params = greedy(max_tokens=length, ignore_eos=True)
        assert seq.output_ids == alone(model, ByteTokenizer(), seq.token_ids[: seq.prompt_len], params)[0].output_ids


@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 2.0}, {"logprobs": 1}, {"min_tokens": 3}, {"logit_bias": {65: 3.0}}]
)
def test_what_looks_at_tokens_is_not_run_ahead(options: dict) -> None:
    """And neither are its neighbours, as long as it runs."""
    model = MockModel()
    llm = engine(model)
    plain, special = greedy(max_tokens=12, ignore_eos=True), greedy(max_tokens=6, ignore_eos=True, **options)
    first = llm.add(PROMPT, plain)[0]
    llm.step()
    second = llm.add(list(b"other"), special)[0]
    seen = set()
    while not second.is_finished:
        llm.step()
        seen.add(first.num_unread)
    drain(llm)
    assert 0 in seen
    assert first.output_ids == alone(model, ByteTokenizer(), PROMPT, plain)[0].output_ids
    assert second.output_ids == alone(model, ByteTokenizer(), list(b"other"), special)[0].output_ids


def test_drafts_are_not_run_ahead() -> None:
    text = [*b"hello world", EOS]
    llm = engine(Script(len(PROMPT), text), speculate=Oracle([PROMPT + text], k=3, wrong=10**6), draft_length="fixed")
    (seq,) = llm.add(PROMPT, greedy())
    while llm.has_work:
        llm.step()
        assert seq.num_unread == 0
    assert seq.output_ids == text
    assert seq.num_accepted > 5
