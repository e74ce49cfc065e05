"""The engine: requests in, texts out, refusals, and what a request may ask for. Exactness is in test_exactness.py."""

import math
from typing import Any

import pytest
import torch
from mock_model import EOS, OTHER_EOS, SPECIAL, ByteTokenizer, MockModel, Oracle, Script, alone, record

from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import FinishReason, SamplingParams, Sequence, Text
from whorl.engine.speculate import DraftLength
from whorl.engine.speculate.prompt_lookup import PromptLookup

PROMPT = list(b"once upon a time")


def engine(model: object | None = None, **options: object) -> LLM:
    settings = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 64}
    settings |= {"draft_length": "fixed"}
    return LLM(model=model or MockModel(), tokenizer=ByteTokenizer(), **{**settings, **options})  # type: ignore[arg-type]


def say(answer: bytes | list[int], *, draft: bool = False, **params: object) -> Output:
    """What becomes of a model's answer; with `draft`, of one that is accepted in one go."""
    speculate = Oracle([PROMPT + list(answer)], k=64, wrong=10**6) if draft else None
    llm = engine(Script(len(PROMPT), list(answer)), speculate=speculate, max_num_batched_tokens=128)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, **params), progress=False)  # type: ignore[arg-type]
    assert llm.pool.num_used == 0
    return output


def drain(llm: LLM) -> None:
    while llm.has_work:
        llm.step()


# ---- ends


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_any_end_of_text_stops(end: int, draft: bool) -> None:
    output = say([*b"hello", end, *b"more"], draft=draft)
    assert (output.text, output.finish_reason) == ("hello", FinishReason.STOP)
    assert output.token_ids == [*b"hello", end]


def test_ignore_eos() -> None:
    output = say([*b"he", EOS, *b"llo"], ignore_eos=True, max_tokens=6)
    assert (output.text, output.finish_reason) == ("hello", FinishReason.LENGTH)


@pytest.mark.parametrize("draft", [False, True])
def test_stop_tokens(draft: bool) -> None:
    output = say(b"hello world", stop_token_ids=(ord("w"),), draft=draft)
    assert (output.text, output.token_ids) == ("hello ", list(b"hello w"))


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [(("o w",), "hell"), (("world", "lo"), "hel"), (("zzz", "d"), "hello worl"), (("hello",), ""), (("zzz",), None)],
)
def test_stop_strings_across_tokens(stop: tuple[str, ...], text: str | None, draft: bool) -> None:
    output = say([*b"hello world", EOS], stop=stop, draft=draft)
    assert output.text == ("hello world" if text is None else text)
    assert output.finish_reason == FinishReason.STOP


def test_a_stop_string_may_be_kept() -> None:
    assert say(b"hello world", stop=("o w",), include_stop=True).text == "hello w"


def test_stop_strings_in_pieces_of_characters() -> None:
    answer = "na\u00efve caf\u00e9 \u2603!".encode()
    assert say([*answer, EOS], stop=("\u2603",)).text == "na\u00efve caf\u00e9 "
    assert say(list(answer[:-2]), max_tokens=len(answer) - 2).text == "na\u00efve caf\u00e9 \ufffd"


@pytest.mark.parametrize("draft", [False, True])
def test_max_tokens_is_kept_also_within_a_draft(draft: bool) -> None:
    output = say(b"hello world", max_tokens=4, draft=draft)
    assert (output.text, output.finish_reason) == ("hell", FinishReason.LENGTH)


@pytest.mark.parametrize("draft", [False, True])
def test_min_tokens_holds_off_every_end(draft: bool) -> None:
    output = say([*b"he", EOS, *b"l", EOS, *b"o w", EOS], min_tokens=5, draft=draft)
    assert EOS not in output.token_ids[:5]
    assert output.token_ids[5:] == [*b"o w", EOS]
    assert say([*b"hello", EOS], min_tokens=5, draft=draft).text == "hello"
    assert say(b"hello world hello", min_tokens=8, stop=("lo",), draft=draft).text == "hello world hel"


@pytest.mark.parametrize("speculate", [None, PromptLookup(k=20, min_hist=1, guard=False)])
def test_the_context_limit_ends_a_sequence(speculate: PromptLookup | None) -> None:
    llm = engine(num_blocks=6, speculate=speculate)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True), progress=False)
    assert (len(output.token_ids), output.finish_reason) == (24 - len(PROMPT), FinishReason.LENGTH)


# ---- text as it comes


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    text = Text(ByteTokenizer().detokenizer(), ("stop!",))
    pieces = []
    for byte in b"a st sto stop! x":
        is_found = text.add(byte)
        pieces.append(text.take(is_finished=is_found))
        if is_found:
            break
    assert "".join(pieces) == "a st sto "
    assert text.match == "stop!"
    assert "s" not in pieces  # alone it might have been the beginning
    assert pieces[4] == "st "


def test_deltas_join_to_the_output() -> None:
    llm = engine(Script(len(PROMPT), [*b"one two three four", EOS]), speculate=PromptLookup(min_hist=1, guard=False))
    (seq,) = llm.add(PROMPT, SamplingParams(temperature=0, stop=(" four", "zz")))
    deltas = []
    while llm.has_work:
        deltas += llm.step()
    assert "".join(delta.text for delta in deltas) == seq.text.value == "one two three"
    assert [t for delta in deltas for t in delta.token_ids] == seq.output_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.STOP]


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "0 tokens"),
        ("", {}, "0 tokens"),
        ([1] * 32, {}, "32 tokens leave no room for an answer: sequences have up to 32"),
        ([1] * 100, {}, "100 tokens leave no room"),
        ([1] * 30, {"max_tokens": 3}, "make 33: sequences have up to 32. Set max_tokens to at most 2"),
        ([1] * 30, {"min_tokens": 3}, "expected at most 2, the room"),
        ([264], {}, r"\[264\] are outside the vocabulary of 264"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias"),
        ([1], {"n": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_run_is_refused_when_submitted(prompt: str | list[int], params: dict, words: str) -> None:
    llm = engine(num_blocks=8)
    with pytest.raises(ValueError, match=words):
        llm.add(prompt, SamplingParams(**params))
    assert not llm.has_work
    fits = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    assert len(llm.generate([1] * 30, fits, progress=False)[0].token_ids) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": {1: math.nan}},
        {"seed": 2**63},
        {"n": 0},
        {"stop": ("",)},
        {"stop": "text"},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_impossible_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len is 65, expected 2 to 64, the tokens that the cache holds"):
        engine(num_blocks=16, max_model_len=65)
    with pytest.raises(ValueError, match=r"max_model_len is 600, expected 2 to 512, .* the model's context holds"):
        engine(num_blocks=1000, max_model_len=600)
    with pytest.raises(TypeError, match="max_num_sequences"):
        engine(max_num_sequences=3)
    with pytest.raises(ValueError, match="2 prompts and 1 params"):
        engine().generate([[1], [2]], [SamplingParams()])


def test_text_needs_a_tokenizer() -> None:
    llm = LLM(model=MockModel(), device="cpu", num_blocks=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.add("text")
    with pytest.raises(ValueError, match="need a tokenizer"):
        llm.add([1], SamplingParams(stop=("x",)))
    (output,) = llm.generate([1, 2], SamplingParams(max_tokens=3), progress=False)
    assert (len(output.token_ids), output.text) == (3, "")


def test_one_wrong_prompt_of_many_leaves_nothing_behind() -> None:
    llm = engine()
    with pytest.raises(ValueError, match="0 tokens"):
        llm.generate([[1, 2], []], progress=False)
    assert not llm.has_work


# ---- many at once


def test_generate_keeps_the_order_and_tells_the_time(capsys: pytest.CaptureFixture) -> None:
    llm = engine(max_num_seqs=2)
    prompts = ["a", "bb", [99, 99, 99], "dddd"]
    outputs = llm.generate(
        prompts, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 2, 5, 1)]
    )
    assert [len(output.token_ids) for output in outputs] == [9, 2, 5, 1]
    assert [output.prompt_ids for output in outputs] == [[97], [98, 98], [99, 99, 99], [100] * 4]
    assert all(output.timings.time_to_first_token > 0 for output in outputs)
    assert [output.timings.tokens_per_second is not None for output in outputs] == [True, True, True, False]
    assert "generating" in capsys.readouterr().err
    llm.generate("a", SamplingParams(max_tokens=1), progress=False)
    assert capsys.readouterr().err == ""


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    (other,) = llm.add([5], SamplingParams(max_tokens=4, ignore_eos=True))
    step, count = llm.step, iter(range(100))

    def interrupted() -> list:
        if next(count) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT], progress=False)
    monkeypatch.undo()
    drain(llm)
    assert other.finish_reason == FinishReason.LENGTH
    assert llm.pool.num_used == 0


def test_abort_in_any_state() -> None:
    llm = engine(max_num_seqs=2, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    filling, decoding, waiting = llm.add(PROMPT * 2, params) + llm.add([1], params) + llm.add([2], params)
    llm.abort(waiting)
    llm.step()
    llm.abort(filling)
    llm.abort(filling)
    assert filling.finish_reason == waiting.finish_reason == FinishReason.ABORT
    drain(llm)
    assert decoding.finish_reason == FinishReason.LENGTH
    llm.abort(decoding)
    assert decoding.finish_reason == FinishReason.LENGTH
    assert llm.pool.num_used == 0


def test_stats_count() -> None:
    llm = engine(speculate=Oracle([]))
    llm.add(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    llm.step()
    assert llm.stats()["num_running"] == 1
    assert llm.stats()["num_blocks_used"] == 4
    drain(llm)
    assert llm.stats()["num_blocks_used"] == llm.stats()["num_running"] == 0


# ---- speculation


def test_accepted_drafts_save_steps_and_are_counted() -> None:
    output = say([*b"hello world", EOS], draft=True)
    assert (output.num_drafted, output.num_accepted) == (10, 10)  # nothing is drafted across the end of the text
    text = list(b"hello world")
    llm = engine(Script(len(PROMPT), text), speculate=Oracle([PROMPT + text], k=5, wrong=10**6))
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=11), progress=False)
    assert llm.num_steps == 3  # 1 token, then 5 and 3 drafted ones with one more each
    assert llm.stats()["num_accepted"] == llm.stats()["num_drafted"]


def test_no_draft_crosses_a_special_token() -> None:
    text = [*b"abc", SPECIAL, *b"def"]
    llm = engine(Script(len(PROMPT), text), speculate=Oracle([PROMPT + text], k=8, wrong=10**6))
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=7), progress=False)
    assert output.token_ids == text
    assert output.num_drafted == 2 + 2  # b c, then e f: a special token is never drafted, nor what is behind it


def test_drafting_stops_where_it_does_not_pay() -> None:
    texts = [PROMPT + list(range(100, 140))]
    dear = DraftLength({1: 1.0, 64: 64.0})
    wrong = engine(Script(len(PROMPT), texts[0][len(PROMPT) :]), speculate=Oracle(texts, wrong=1), draft_length=dear)
    wrong.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40), progress=False)
    assert wrong.num_drafted <= 2
    free = DraftLength({1: 1.0, 64: 1.0})
    right = engine(Script(len(PROMPT), texts[0][len(PROMPT) :]), speculate=Oracle(texts, wrong=99), draft_length=free)
    right.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40), progress=False)
    assert right.num_drafted > 25


def test_cost_is_measured_without_touching_the_cache() -> None:
    llm = engine()
    llm.add(PROMPT, SamplingParams(max_tokens=3))
    llm.step()
    before = [cache.k.clone() for cache in llm.runner.caches]
    cost = llm.measure_cost(8)
    assert list(cost) == [1, 2, 3, 4, 6, 8]
    assert all(seconds > 0 for seconds in cost.values())
    assert all(torch.equal(cache.k, old) for cache, old in zip(llm.runner.caches, before, strict=True))
    DraftLength(cost)


# ---- sampling


def one(params: SamplingParams, prompt: list[int] = PROMPT, **options: object) -> Sequence:
    llm = engine(**options)
    (seq,) = llm.add(prompt, params)
    drain(llm)
    return seq


def test_the_tail_of_the_vocabulary_is_never_sampled() -> None:
    model = MockModel()
    model.head[ByteTokenizer().__len__() :] *= 100  # padding that would win everywhere
    llm = engine(model)
    params = [SamplingParams(max_tokens=20, temperature=t, ignore_eos=True) for t in (0.0, 1.0, 5.0)]
    outputs = llm.generate([PROMPT] * 3, params, progress=False)
    assert all(token < len(ByteTokenizer()) for output in outputs for token in output.token_ids)


def test_seeds_do_not_depend_on_the_batch() -> None:
    params = [SamplingParams(max_tokens=12, seed=seed, temperature=2.0, ignore_eos=True) for seed in (1, 2, 1, -5)]
    plain = [one(p).output_ids for p in params]
    assert plain[0] == plain[2] != plain[1]
    together = engine().generate([PROMPT] * 4, params, progress=False)
    assert [output.token_ids for output in together] == plain


def test_without_a_seed_requests_differ_and_the_engine_s_seed_fixes_them() -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)

    def run(seed: int | None) -> list[list[int]]:
        return [o.token_ids for o in engine(seed=seed).generate([PROMPT] * 2, params, progress=False)]

    first, second = run(3)
    assert first != second
    assert run(3) == [first, second]
    assert run(None) != [first, second]


def test_n_copies_differ_and_the_first_is_the_one_alone() -> None:
    params = {"max_tokens": 12, "temperature": 2.0, "ignore_eos": True, "seed": 11}
    outputs = engine().generate(PROMPT, SamplingParams(n=3, **params), progress=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert outputs[0].token_ids == one(SamplingParams(**params)).output_ids
    assert [output.num_cached for output in outputs] == [0, 12, 12]  # the prompt is computed once


def test_greedy_and_sampled_share_a_batch() -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    hot = SamplingParams(max_tokens=8, temperature=3.0, seed=1, ignore_eos=True)
    alone_greedy = one(greedy).output_ids
    outputs = engine().generate([PROMPT] * 3, [hot, greedy, hot], progress=False)
    assert outputs[1].token_ids == alone_greedy != outputs[0].token_ids == outputs[2].token_ids


def test_top_k_one_is_greedy() -> None:
    hot = SamplingParams(max_tokens=8, temperature=3.0, top_k=1, seed=1, ignore_eos=True)
    assert one(hot).output_ids == one(SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)).output_ids


@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": {65: 1e308}},
        {"logit_bias": {65: 1e308, 66: 1e308}, "min_p": 0.5},
        {"repetition_penalty": 1e-300},
        {"logit_bias": dict.fromkeys(range(264), -math.inf)},
    ],
    ids=str,
)
def test_extreme_parameters_end_in_tokens(extreme: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.5, ignore_eos=True, seed=1, **extreme)
    assert len(one(params).output_ids) == 3


def test_logit_bias_and_allowed_tokens() -> None:
    params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert one(SamplingParams(logit_bias={65: 1e4}, **params)).output_ids == [65] * 4
    banned = one(SamplingParams(**params)).output_ids[0]
    assert banned not in one(SamplingParams(logit_bias={banned: -math.inf}, **params)).output_ids

    def allow(output: object) -> torch.Tensor:
        mask = torch.zeros(len(ByteTokenizer()), dtype=torch.bool)
        mask[70 + len(output)] = True  # type: ignore[arg-type]
        return mask

    sampling = SamplingParams(allow=allow, **params)
    assert one(sampling).output_ids == [70, 71, 72, 73]
    # A draft is held to the same rule, position by position (vLLM #9423).
    drafted = one(sampling, speculate=Oracle([[*PROMPT, 70, 71, 0, 0]], k=4, wrong=10**6))
    assert (drafted.output_ids, drafted.num_accepted) == ([70, 71, 72, 73], 1)


def test_penalties_see_the_output_so_far() -> None:
    """With a strong penalty nothing comes twice, also where a draft would have it."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, frequency_penalty=1e4)
    plain = one(params)
    assert len(set(plain.output_ids)) == 30
    drafted = one(params, speculate=Oracle([plain.token_ids], k=6))
    assert drafted.output_ids == plain.output_ids
    assert drafted.num_accepted > 10
    repeated = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, repetition_penalty=1e4)
    assert not set(one(repeated).output_ids) & set(PROMPT)  # the prompt counts here, and only here


# ---- logprobs


def test_logprobs_are_the_model_s_own() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.7, top_k=3, seed=4, ignore_eos=True, logprobs=2)
    seq, logits = alone(MockModel(), ByteTokenizer(), PROMPT, params)
    assert len(seq.logprobs) == seq.num_outputs == 6
    for i, logprob in enumerate(seq.logprobs):
        expected = logits[i].log_softmax(-1)
        assert logprob.token_id == seq.output_ids[i]
        assert logprob.logprob == pytest.approx(expected[logprob.token_id].item())
        values, ids = expected[: len(ByteTokenizer())].topk(2)
        assert [t for t, _ in logprob.top] == ids.tolist()
        assert [v for _, v in logprob.top] == pytest.approx(values.tolist())


@pytest.mark.parametrize("draft", [False, True])
def test_logprobs_come_with_every_token_also_of_drafts(draft: bool) -> None:
    output = say([*b"hello", EOS, *b"more"], logprobs=0, draft=draft)
    assert [each.token_id for each in output.logprobs] == output.token_ids
    assert all(each.top == () for each in output.logprobs)


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_prompt_logprobs(num_blocks: int) -> None:
    """In chunks, behind a cached prefix and through preemption: every prompt token but the first is scored once."""
    model = MockModel()
    llm = engine(model, max_num_batched_tokens=8, num_blocks=num_blocks)
    llm.generate(PROMPT, SamplingParams(max_tokens=2), progress=False)
    (other,) = llm.add([7, 8, 9], SamplingParams(max_tokens=25, ignore_eos=True))
    (seq,) = llm.add(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=1))
    drain(llm)
    assert [each.token_id for each in seq.prompt_logprobs] == PROMPT[1:]
    assert other.num_outputs == 25
    for end in range(1, len(PROMPT)):
        _, logits = alone(model, ByteTokenizer(), PROMPT[:end], SamplingParams(max_tokens=1))
        expected = logits[0].log_softmax(-1)[PROMPT[end]].item()
        assert seq.prompt_logprobs[end - 1].logprob == pytest.approx(expected, rel=1e-6)


# ---- chats


def test_a_chat_that_goes_on_finds_its_answers_in_the_cache() -> None:
    """And computes what it would have computed without."""
    model, params = MockModel(), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    llm = engine(model)
    (first,) = llm.add(PROMPT, params)
    drain(llm)
    history = first.token_ids + list(b" and then?")
    recorded = record(llm)
    (again,) = llm.add(history, params)
    drain(llm)
    assert again.num_cached == 24  # 16 of the prompt and 8 of 9 generated: the last was never computed
    fresh = engine(model)
    plain = record(fresh)
    (without,) = fresh.add(history, params)
    drain(fresh)
    assert without.num_cached == 0
    assert all(torch.equal(recorded[again.id][i], plain[without.id][i]) for i in range(9))


def test_progress_is_made_when_every_sequence_wants_the_last_block() -> None:
    llm = engine(num_blocks=8, max_num_seqs=4)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = llm.generate([[i] * 5 for i in range(6)], params, progress=False)
    assert all(len(output.token_ids) == 20 for output in outputs)
    assert llm.scheduler.num_preemptions > 0
