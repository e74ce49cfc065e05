"""The scheduler alone: tokens are made up, nothing is computed."""

import random
from typing import Any

import pytest

from whorl.engine.blocks import BlockPool
from whorl.engine.scheduler import Chunk, Scheduler
from whorl.engine.sequence import FinishReason, SamplingParams, Sequence


def scheduler(
    num_blocks: int = 64, block_size: int = 4, *, seqs: int = 8, tokens: int = 32, share: bool = True
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size, use_prefix_cache=share)
    return Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def add(
    to: Scheduler, length: int, *, token: int = 1, max_len: int = 200, after: Sequence | None = None, **params: Any
) -> Sequence:
    seq = Sequence([token] * length, SamplingParams(**params), max_len=max_len, after=after)
    to.add(seq)
    return seq


def run(to: Scheduler, chunks: list[Chunk]) -> None:
    """As the engine does after a step: one token for every sequence that is through."""
    for chunk in chunks:
        is_last = chunk.is_last
        chunk.sequence.num_computed += chunk.length
        to.pool.publish(chunk.sequence)
        if is_last:
            chunk.sequence.append(random.Random(len(chunk.sequence.token_ids)).randint(100, 999))
            if chunk.sequence.is_finished:
                to.finish(chunk.sequence)


def step(to: Scheduler, **options: int) -> dict[Sequence, int]:
    chunks = to.schedule(**options)
    lengths = {chunk.sequence: chunk.length for chunk in chunks}
    run(to, chunks)
    return lengths


def test_decoding_comes_first_and_prompts_fill_the_rest() -> None:
    """A long prompt does not stall those that decode (nano-vllm #73, #276)."""
    sched = scheduler(tokens=8)
    first, second = add(sched, 3), add(sched, 3, token=2)
    assert step(sched) == {first: 3, second: 3}
    long = add(sched, 20, token=3)
    assert [step(sched) for _ in range(4)] == [{first: 1, second: 1, long: 6}] * 3 + [{first: 1, second: 1, long: 2}]
    assert step(sched) == {first: 1, second: 1, long: 1}


def test_several_prompts_may_be_cut_in_one_step() -> None:
    sched = scheduler(tokens=8)
    first, second = add(sched, 5), add(sched, 9, token=2)
    assert step(sched) == {first: 5, second: 3}
    assert step(sched) == {first: 1, second: 6}


def test_the_budget_and_the_number_of_sequences_are_kept() -> None:
    sched = scheduler(seqs=2, tokens=4)
    a, b, c = (add(sched, 3, token=i, max_len=5) for i in range(3))
    assert step(sched) == {a: 3, b: 1}
    assert step(sched) == {a: 1, b: 2}
    assert a.is_finished
    assert step(sched) == {b: 1, c: 3}


def test_a_prefix_hit_is_known_before_tokens_are_counted() -> None:
    """nano-vllm #211, #233: the chunk is what the cache does not hold."""
    sched = scheduler(tokens=16)
    add(sched, 9, max_len=10)
    step(sched)
    again = add(sched, 9)
    assert step(sched) == {again: 1}
    assert (again.num_cached, again.num_computed) == (8, 9)


def test_a_full_cache_preempts_the_last_admitted() -> None:
    sched = scheduler(num_blocks=4, block_size=2, share=False)
    first, second = add(sched, 3), add(sched, 2, token=2)
    assert step(sched) == {first: 3, second: 2}
    assert step(sched) == {first: 1, second: 1}
    assert step(sched) == {first: 1}
    assert (second.num_preempted, second.block_table, second.num_computed) == (1, [], 0)
    assert list(sched.waiting) == [second]
    assert second.output_ids != []


def test_the_preempted_come_back_first_and_whole() -> None:
    sched = scheduler(num_blocks=4, block_size=2, share=False)
    first, second = add(sched, 3, max_len=6), add(sched, 2, token=2)
    for _ in range(2):
        step(sched)
    third = add(sched, 2, token=3)
    step(sched)
    assert first.is_finished
    assert list(sched.waiting) == [second, third]
    lengths = step(sched)
    assert list(lengths) == [second, third]
    assert lengths[second] == 4  # its prompt and what it had generated
    assert step(sched)[second] == 1


def test_what_the_preempted_find_again_was_not_cached() -> None:
    """A request is told what the cache gave it at first, not what it had computed itself."""
    sched = scheduler(num_blocks=4, block_size=2)
    first, second = add(sched, 3, max_len=6), add(sched, 2, token=2)
    while not first.is_finished:
        step(sched)
    assert (second.num_preempted, second.lane) == (1, -1)
    step(sched)
    assert second.num_computed > 2, "its prompt is in the cache still"
    assert second.num_cached == 0


def test_the_preempted_wait_for_a_token_under_way() -> None:
    """Blocks are given for all tokens, and this one is not known yet; those behind it do not overtake."""
    sched = scheduler()
    first, second = add(sched, 3), add(sched, 2)
    first.num_unread = 1
    assert sched.schedule() == []
    first.append(5)
    first.num_unread = 0
    assert list(step(sched)) == [first, second]


def test_copies_wait_for_the_first_and_share_its_prompt() -> None:
    sched = scheduler(tokens=6, seqs=4)
    first = add(sched, 9)
    copy, other = add(sched, 9, after=first), add(sched, 2, token=5)
    assert step(sched) == {first: 6}
    assert step(sched) == {first: 3, other: 2}
    assert step(sched) == {first: 1, other: 1, copy: 1}
    assert copy.num_cached == 8


def test_a_copy_does_not_wait_for_one_that_is_gone() -> None:
    sched = scheduler(tokens=4, seqs=2)
    first = add(sched, 9)
    copy = add(sched, 9, after=first)
    step(sched)
    first.finish(FinishReason.ABORT)
    sched.finish(first)
    assert copy in step(sched)


def test_drafts_get_what_is_left() -> None:
    sched = scheduler(tokens=8)
    first, second = add(sched, 2), add(sched, 2, token=2, max_len=5)
    step(sched)
    chunks = sched.schedule(lookahead=5)
    assert [chunk.room for chunk in chunks] == [3, 1]  # the second may have 2 tokens more, one of them without a draft
    run(sched, chunks)
    long = add(sched, 20, token=3)
    chunks = sched.schedule(lookahead=5)
    assert [(chunk.sequence, chunk.room) for chunk in chunks] == [(first, 0), (second, 0), (long, 0)]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    sched = scheduler(num_blocks=4, block_size=2, share=False)
    first, second = add(sched, 4), add(sched, 4, token=2)
    assert step(sched) == {first: 4}
    assert list(sched.waiting) == [second]


@pytest.mark.parametrize(("seqs", "tokens", "words"), [(0, 4, "max_num_seqs is 0"), (8, 7, "is below max_num_seqs 8")])
def test_impossible_settings_are_refused(seqs: int, tokens: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scheduler(seqs=seqs, tokens=tokens)


# ---- several clients


def test_clients_take_turns() -> None:
    sched = scheduler(seqs=2, tokens=8)
    heavy = [add(sched, 4, token=i, client="heavy", max_len=5) for i in range(6)]
    assert list(step(sched)) == heavy[:2]
    lone = add(sched, 3, token=7, client="lone", max_len=4)
    assert list(step(sched)) == [heavy[2], lone]
    assert list(step(sched)) == heavy[3:5]


def test_turns_are_counted_in_tokens() -> None:
    """While one client has a long prompt computed, the other gets as many tokens in short ones."""
    sched = scheduler(seqs=8, tokens=8)
    long = [add(sched, 12, token=i, client="long", max_len=13) for i in range(8)]
    short = [add(sched, 2, token=10 + i, client="short", max_len=3) for i in range(24)]
    done = {"long": 0, "short": 0}
    for _ in range(11):
        for seq, length in step(sched).items():
            done[str(seq.client)] += length
    assert abs(done["long"] - done["short"]) <= 12
    assert sum(seq.is_finished for seq in long) < sum(seq.is_finished for seq in short)


def test_a_client_that_was_away_saved_up_no_turns() -> None:
    sched = scheduler(seqs=2, tokens=8, num_blocks=256)
    first, second = (add(sched, 2, token=i, client=name) for i, name in enumerate(("busy", "other")))
    for _ in range(50):
        step(sched)
    for seq in (second, first):
        seq.finish(FinishReason.ABORT)
        sched.finish(seq)
    queued = [add(sched, 4, token=3 + i, client=("busy", "away")[i % 2], max_len=5) for i in range(8)]
    order = [seq for _ in range(4) for seq in step(sched)]
    assert sorted(order[:4], key=queued.index) == queued[:4]


def test_a_client_of_which_nothing_runs_gets_a_lane() -> None:
    """The other gives up its newest sequence, which goes on where it was once a lane is free, and keeps its oldest."""
    sched = scheduler(seqs=3, tokens=32, num_blocks=256)
    heavy = [add(sched, 4, token=i, client="heavy") for i in range(5)]
    step(sched)
    lone = add(sched, 4, token=7, client="lone", max_len=6)
    assert step(sched) == {heavy[0]: 1, heavy[1]: 1, lone: 4}
    assert (heavy[2].num_preempted, list(sched.waiting)) == (1, heavy[2:])
    second = add(sched, 4, token=8, client="lone")
    assert lone in step(sched), "a client of which something runs waits"
    assert lone.is_finished
    third = add(sched, 4, token=9, client="third")
    assert list(step(sched))[1:] != []
    assert {seq.client for seq in sched.running} == {"heavy", "lone", "third"}
    assert [heavy[0], second, third] == sorted(sched.running, key=lambda seq: seq.id)
    fourth = add(sched, 4, token=9, client="fourth")
    step(sched)
    assert fourth.lane < 0, "nobody gives up its only sequence"


def test_a_client_of_which_nothing_runs_gets_blocks() -> None:
    sched = scheduler(num_blocks=8, block_size=2, share=False)
    heavy = [add(sched, 4, token=i, client="heavy") for i in range(3)]
    step(sched)
    lone = add(sched, 3, token=7, client="lone", max_len=6)
    for _ in range(3):
        assert lone in step(sched)
    assert lone.is_finished
    assert (lone.num_preempted, heavy[0].num_preempted) == (0, 0)


def test_a_long_prompt_of_another_client_does_not_hold_up() -> None:
    sched = scheduler(tokens=8)
    long = add(sched, 40, client="heavy")
    assert step(sched) == {long: 8}
    lone = add(sched, 5, token=2, client="lone")
    assert step(sched) == {lone: 5, long: 3}


def test_a_full_cache_preempts_of_the_client_with_most() -> None:
    sched = scheduler(num_blocks=6, block_size=2, share=False)
    first, second = (add(sched, 2, token=i, client="heavy") for i in range(2))
    lone = add(sched, 2, token=7, client="lone")
    for _ in range(4):
        step(sched)
    assert (first.num_preempted, lone.num_preempted) == (0, 0)
    assert second.num_preempted


def test_a_shared_step_decodes_equal_parts_in_turns() -> None:
    sched = scheduler(seqs=8, num_blocks=256)
    sched._max_shared = 4
    heavy = [add(sched, 4, token=i, client="heavy") for i in range(5)]
    assert [len(step(sched)) for _ in range(3)] == [5, 5, 5], "a client alone decodes all"
    lone = add(sched, 4, token=7, client="lone")
    step(sched)
    before = [seq.num_outputs for seq in heavy]
    for _ in range(10):
        lengths = step(sched)
        assert lone in lengths
        assert len(lengths) == 3
    assert {seq.num_outputs - count for seq, count in zip(heavy, before, strict=True)} <= {3, 4, 5}


def test_priority_orders_the_requests_of_a_client() -> None:
    sched = scheduler(seqs=1)
    last, middle, first, tie = (add(sched, 4, token=i, max_len=5, priority=p) for i, p in enumerate((9, 0, -3, 0)))
    assert [seq for _ in range(4) for seq in step(sched)] == [first, middle, tie, last]


def test_a_client_does_not_pass_others_by_its_own_numbers() -> None:
    sched = scheduler(seqs=1)
    first = add(sched, 4, client="first", max_len=5)
    add(sched, 4, token=2, client="other", max_len=5, priority=-100)
    assert list(step(sched)) == [first]


def test_work_that_yields_makes_way() -> None:
    """A priority above 0 waits behind all else, and gives up its lane."""
    sched = scheduler(seqs=2, num_blocks=256)
    batch = [add(sched, 4, token=i, client="batch", priority=5) for i in range(3)]
    step(sched)
    others = [add(sched, 4, token=7 + i, client="other", max_len=7) for i in range(3)]
    assert list(step(sched)) == others[:2]
    while not others[2].is_finished:
        assert batch[1] not in step(sched)
    step(sched)
    assert set(sched.running) == set(batch[:2])


def test_the_preempted_come_back_before_their_clients_others() -> None:
    sched = scheduler(seqs=2, num_blocks=256)
    heavy = [add(sched, 4, token=i, client="heavy", max_len=8) for i in range(4)]
    step(sched)
    lone = [add(sched, 4, token=7, client="lone", max_len=5), add(sched, 4, token=8, client="lone", max_len=5)]
    step(sched)
    assert lone[0].is_finished
    assert list(sched.waiting) == [*heavy[1:], lone[1]]
    order = [next((i for i, seq in enumerate(heavy) if seq.is_finished), None)]
    for _ in range(12):
        step(sched)
        order += [i for i, seq in enumerate(heavy) if seq.is_finished and i not in order]
    assert order[1:] == [0, 1, 2, 3]


def test_a_queue_forgets_clients() -> None:
    sched = scheduler(seqs=4, tokens=64, num_blocks=256)
    for number in range(2000):
        add(sched, 4, token=number, client=f"client {number}", max_len=5)
        step(sched)
        if number % 100:
            add(sched, 4, client="always")
    assert len(sched.waiting._served) < 600


@pytest.mark.parametrize(("clients", "priorities"), [((None,), (0,)), ((None, "a", "b"), (-1, 0, 0, 2))])
@pytest.mark.parametrize("seed", range(40))
def test_everything_ends(seed: int, clients: tuple[str | None, ...], priorities: tuple[int, ...]) -> None:
    """Preemption x prefix hits x aborts: every sequence ends, chunks fit their blocks, no block is left behind."""
    rng = random.Random(seed)
    block_size, seqs = rng.randint(1, 4), rng.randint(1, 6)
    longest = 4 * block_size * rng.randint(1, 2)
    num_blocks = rng.randint(-(-longest // block_size), 12)
    sched = scheduler(num_blocks, block_size, seqs=seqs, tokens=rng.randint(seqs, 16), share=rng.random() < 0.7)
    sequences: list[Sequence] = []
    for turn in range(2000):
        if turn < 60 and rng.random() < 0.5:
            length = rng.randint(1, longest - 1)
            params = SamplingParams(client=rng.choice(clients), priority=rng.choice(priorities))
            seq = Sequence([1, 2] * (length // 2) + [rng.randint(1, 2)] * (length % 2), params, max_len=longest)
            sched.add(seq)
            sequences.append(seq)
        if sequences and rng.random() < 0.05 and not (victim := rng.choice(sequences)).is_finished:
            victim.finish(FinishReason.ABORT)
            sched.finish(victim)
        chunks = sched.schedule(lookahead=rng.randint(0, 3))
        assert sum(chunk.length + chunk.room for chunk in chunks) <= sched.max_num_batched_tokens
        assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= sched.max_num_seqs
        for chunk in chunks:
            seq = chunk.sequence
            assert 0 < chunk.length <= seq.num_pending
            assert sched.pool.blocks_for(len(seq.token_ids)) <= len(seq.block_table)
        assert chunks or not sched.has_work, "work, and nothing scheduled"
        run(sched, chunks)
        if turn > 60 and not sched.has_work:
            break
    assert all(seq.is_finished for seq in sequences)
    assert sched.pool.num_used == 0
