"""Prompt lookup and draft lengths; that drafts never change the output is in test_engine.py."""

import logging

import pytest

from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate import DraftLength, cut, measure_cost
from whorl.engine.speculate.prompt_lookup import PromptLookup


def sequence(tokens: list[int], num_outputs: int = 0) -> Sequence:
    split = len(tokens) - num_outputs
    seq = Sequence(tokens[:split], SamplingParams(), max_len=10_000)
    for token in tokens[split:]:
        seq.append(token)
    return seq


def guess(proposer: PromptLookup, *sequences: Sequence) -> list[list[int]]:
    return [draft.token_ids for draft in proposer.propose(sequences, proposer.k)]


def draft(tokens: list[int], **options: int) -> list[int]:
    return guess(PromptLookup(**{"min_hist": 1, **options}), sequence(tokens))[0]


def test_defaults() -> None:
    lookup = PromptLookup()
    assert (lookup.k, lookup.ngram, lookup.min_hist) == (10, 1, 20)
    assert (lookup.guard, lookup.guard_distinct, lookup.guard_tail, lookup.loop_warn) == (True, 3, 6, 8)


def test_what_followed_is_drafted() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 1, 2], k=3) == [3, 4, 5]
    assert draft([1, 2, 3, 4, 5, 6, 9], k=3) == []
    assert draft([5], k=3) == []


def test_the_longest_match_wins() -> None:
    tokens = [1, 2, 3, 40, 41, 42, 9, 2, 3, 50, 51, 52, 8, 1, 2, 3]
    assert draft(tokens, k=3) == [40, 41, 42]
    # Longer than the index's own n-grams: 5 tokens decide between two matches of 4.
    tokens = [1, 2, 3, 4, 5, 60, 61, 62, 0, 2, 3, 4, 5, 70, 71, 72, 7, 1, 2, 3, 4, 5]
    assert draft(tokens, k=3) == [60, 61, 62]


def test_shorter_matches_are_the_fallback_down_to_ngram() -> None:
    tokens = [7, 3, 40, 41, 42, 8, 3]
    assert draft(tokens, k=3, ngram=1) == [40, 41, 42]
    assert draft(tokens, k=3, ngram=2) == []


def test_min_hist() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    assert draft(tokens, min_hist=9, k=3) == []
    assert draft(tokens, min_hist=8, k=3) == [3, 4, 5]


def test_matches_that_disagree_draft_as_far_as_most_agree() -> None:
    two_of_three = [1, 5, 6, 7, 20, 1, 5, 6, 8, 21, 1, 9, 9, 9, 22, 1]
    assert draft(two_of_three, k=3, guard_distinct=1) == [5, 6]
    one_each = [1, 5, 6, 20, 1, 7, 8, 21, 1]
    assert draft(one_each, k=3) == []


def test_guard_low_distinct() -> None:
    tokens = [1, 8, 9, 8, 9, 8, 9, 2, 3, 1]
    assert draft(tokens, k=6) == []
    assert draft(tokens, k=6, guard_distinct=2) == [8, 9, 8, 9, 8, 9]
    assert draft(tokens, k=6, guard=False) == [8, 9, 8, 9, 8, 9]
    assert draft(tokens, k=2) == [8, 9]  # as distinct as two tokens can be


def test_guard_tail_echo() -> None:
    tokens = [*[4] * 6, 5, 6, 7, 8, *[4] * 6]
    assert draft(tokens, k=4) == [5, 6, 7, 8]
    # Seven before and six now: the match goes on with the token that the tail is made of.
    tokens = [0, *[4] * 7, 5, 6, 7, 1, *[4] * 6]
    assert PromptLookup(min_hist=1, k=4, guard_distinct=1)._is_suspect(tokens, [4, 5, 6, 7])
    assert not PromptLookup(min_hist=1, k=4, guard_distinct=1, guard_tail=7)._is_suspect(tokens, [4, 5, 6, 7])


def test_loops_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    proposer, seq = PromptLookup(), sequence([1] * 20 + [3] * 7, num_outputs=7)
    with caplog.at_level(logging.WARNING):
        guess(proposer, seq)
        assert not caplog.records
        for _ in range(3):
            seq.append(3)
            guess(proposer, seq)
    assert [record.getMessage() for record in caplog.records] == [
        f"sequence {seq.id} repeats token 3: 8 times in a row"
    ]


def test_the_index_grows_with_the_sequence() -> None:
    proposer = PromptLookup(min_hist=1, k=3)
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    assert guess(proposer, seq) == [[]]
    for token in (1, 2):
        seq.append(token)
    assert guess(proposer, seq) == [[3, 4, 5]]
    for token in (3, 9, 1, 2, 3):
        seq.append(token)
    assert guess(proposer, seq) == guess(PromptLookup(min_hist=1, k=3), sequence(seq.token_ids))
    assert proposer.propose([seq], 1)[0].token_ids == guess(proposer, seq)[0][:1]


def test_state_goes_with_the_sequence() -> None:
    proposer = PromptLookup(min_hist=1)
    guess(proposer, sequence([1, 2, 3]))
    assert len(proposer._indices) == 0


def test_no_draft_across_special_tokens() -> None:
    assert cut([1, 2, 99, 3], {99}) == [1, 2]
    assert cut([99], {99}) == []
    assert cut([1, 2], {99}) == [1, 2]


@pytest.mark.parametrize("option", ["k", "ngram", "guard_tail", "loop_warn"])
def test_wrong_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 0"):
        PromptLookup(**{option: 0})


# ---- how much to draft

FLAT = {1: 1.0, 16: 1.0}
LINEAR = {1: 1.0, 16: 16.0}
MOE = {1: 1.0, 2: 1.34, 4: 1.94, 8: 2.95, 11: 3.55}  # Qwen3-30B-A3B at its memory bound, neighbours sharing experts


def after(cost: dict[int, float], rate: float, num: int = 300) -> DraftLength:
    """Having seen drafts of 4 of which the given share of tokens was right."""
    length, count = DraftLength(cost), 0.0
    for _ in range(num):
        count += 4 * rate
        length.observe(4, min(4, int(count)))
        count -= int(count)
    return length


def test_free_drafts_are_long_and_dear_ones_are_not_made() -> None:
    assert DraftLength(FLAT).choose(10, 1) == 10
    assert DraftLength(LINEAR).choose(10, 1) == 0


@pytest.mark.parametrize(("rate", "best"), [(0.5, 1), (0.7, 2), (0.8, 3)])
def test_the_best_length_for_a_mixture_of_experts(rate: float, best: int) -> None:
    length = DraftLength(MOE, acceptance=rate)
    assert abs(length.choose(10, 1) - best) <= 1


def test_acceptance_is_estimated_from_what_was_tried() -> None:
    length = DraftLength(FLAT)
    for _ in range(200):
        length.observe(4, 1)  # one right, one wrong, two never tried
    assert length.acceptance == pytest.approx(0.5, abs=0.02)


def test_it_turns_itself_off_probes_and_comes_back() -> None:
    length = after(MOE, 0.0)
    chosen = [length.choose(10, 1) for _ in range(100)]
    assert set(chosen) == {0, 1}
    assert 2 <= sum(chosen) <= 4
    for _ in range(100):
        length.observe(1, 1)
    assert length.choose(10, 1) > 2


def test_many_sequences_draft_less() -> None:
    """Rows that are nearly free for one sequence are not where the batch already fills the machine."""
    cost = {1: 1.0, 8: 1.1, 64: 8.0}
    length = DraftLength(cost)
    assert length.choose(7, 1) > length.choose(7, 32)
    assert length.choose(7, 0) == 0


def test_costs_beyond_the_table_go_on_as_they_did() -> None:
    length = DraftLength({1: 1.0, 2: 1.1}, acceptance=0.9)
    assert length.choose(10, 1) == DraftLength({1: 1.0, 11: 2.0}, acceptance=0.9).choose(10, 1) > 4
    assert DraftLength({1: 1.0, 2: 2.0}, acceptance=0.9).choose(10, 1) == 0
    assert DraftLength({1: 1.0}, acceptance=0.9).choose(10, 1) == 0


def test_what_drafting_costs_counts() -> None:
    assert DraftLength(FLAT, drafting={1: 0.001}).choose(10, 1) == 10
    assert 0 < DraftLength(FLAT, drafting={1: 0.1}).choose(10, 1) < 10
    assert DraftLength(FLAT, drafting={1: 1.0}).choose(10, 1) == 0
    assert DraftLength(FLAT, drafting={1: 0.1, 8: 0.8}).choose(10, 8) == 0


class Clock:
    """Takes as many tenths of a second as there are rows."""

    def __init__(self) -> None:
        self.timed: list[int] = []

    def cost(self, counts: list[int], *, repeats: int) -> dict[int, float]:
        self.timed += counts
        return {count: 0.1 * count for count in counts}


def test_measuring_ends_when_its_time_is_up() -> None:
    clock = Clock()
    assert measure_cost(clock, (1, 2, 4, 8), 1.0) == pytest.approx({1: 0.1, 2: 0.2, 4: 0.4})
    assert clock.timed == [1, 2, 4]
    assert list(measure_cost(clock, (1, 2, 4, 8), 0.0)) == [1, 2], "one would not tell what a row costs"


def test_a_cost_table_must_be_one() -> None:
    with pytest.raises(ValueError, match="expected positive seconds by number of tokens"):
        DraftLength({})
    with pytest.raises(ValueError, match="expected positive seconds by number of tokens"):
        DraftLength({0: 1.0})
