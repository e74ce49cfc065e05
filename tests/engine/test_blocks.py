"""The block pool: counting, sharing, forgetting. One property each."""

import random
from collections.abc import Callable

import pytest
from mock_model import ByteTokenizer, MockModel
from test_engine import drain, engine

from whorl.engine.blocks import BlockPool
from whorl.engine.sequence import Content, SamplingParams, Sequence
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.states import StatePool


def sequence(tokens: list[int], **options: object) -> Sequence:
    return Sequence(tokens, SamplingParams(**options), max_len=100)  # type: ignore[arg-type]


def compute(pool: BlockPool, seq: Sequence, *, upto: int | None = None) -> Sequence:
    """Admit it, and pretend that its tokens ran."""
    assert pool.admit(seq)
    seq.num_computed = len(seq.token_ids) if upto is None else upto
    pool.publish(seq)
    return seq


def test_blocks_are_taken_and_come_back() -> None:
    pool = BlockPool(4, 3)
    seq = compute(pool, sequence([1, 2, 3, 4]))
    assert (len(set(seq.block_table)), pool.num_used) == (2, 2)
    assert pool.grow(seq, 6)
    assert pool.num_used == 2
    assert pool.grow(seq, 7)
    assert pool.num_used == 3
    pool.shrink(seq)
    assert pool.num_used == 2
    pool.release(seq)
    assert (pool.num_used, seq.block_table, seq.num_computed) == (0, [], 0)


def test_nothing_is_taken_where_not_all_fits() -> None:
    pool = BlockPool(2, 2)
    seq = sequence([1, 2, 3])
    assert not pool.admit(sequence([1] * 5))
    assert not pool.admit(seq, reserve=1)
    assert (pool.num_used, seq.block_table) == (0, [])
    assert pool.admit(seq)
    assert not pool.grow(seq, 5)
    assert len(seq.block_table) == 2


def test_a_full_prefix_is_shared() -> None:
    pool = BlockPool(8, 2)
    first = compute(pool, sequence([1, 2, 3, 4, 5]))
    second = sequence([1, 2, 3, 4, 9, 9])
    assert pool.admit(second)
    assert second.num_computed == 4
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] not in first.block_table
    assert pool.num_used == 4
    pool.release(first)
    assert pool.num_used == 3
    pool.release(second)
    assert pool.num_used == 0


def test_the_last_token_is_always_computed() -> None:
    """A prompt of whole blocks, all of them cached, would otherwise have no query (nano-vllm #144)."""
    pool = BlockPool(8, 2)
    pool.release(compute(pool, sequence([1, 2, 3, 4])))
    again = sequence([1, 2, 3, 4])
    assert pool.admit(again)
    assert (again.num_computed, again.num_pending) == (2, 2)


def test_a_block_is_published_only_when_computed() -> None:
    pool = BlockPool(8, 2)
    compute(pool, sequence([1, 2, 3, 4, 5]), upto=3)
    other = sequence([1, 2, 3, 4, 5])
    assert pool.admit(other)
    assert other.num_computed == 2


def test_what_was_generated_is_found_by_a_prompt_with_the_same_tokens() -> None:
    pool = BlockPool(16, 2)
    said = sequence([1, 2])
    assert pool.admit(said)
    for token in (3, 4, 5):
        said.append(token)
    assert pool.grow(said, 5)
    said.num_computed = 4
    pool.publish(said)
    as_prompt = sequence([1, 2, 3, 4, 5])
    assert pool.admit(as_prompt)
    assert as_prompt.num_computed == 4


CAT, DOG = b"c" * 32, b"d" * 32


def pictures(*digests: bytes, size: int = 5) -> Sequence:
    """A word, then pictures of `size` placeholders each with a word behind."""
    tokens, contents = [1], []
    for digest in digests:
        contents.append(Content(range(len(tokens), len(tokens) + size), digest))
        tokens += [7] * size + [2]
    return Sequence([*tokens, 3], SamplingParams(), max_len=100, contents=contents[::-1])


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("other", "first_foreign"),  # token; words before it are the same
    [((CAT, DOG), 13), ((CAT, CAT), 7), ((DOG, CAT), 1), ((DOG, DOG), 1), (None, 1)],
)
def test_pictures_behind_equal_placeholders_keep_apart(
    other: tuple[bytes, ...] | None, first_foreign: int, block_size: int
) -> None:
    """Blocks that lie in a picture, begin before it or reach past it: all of them are its own."""
    pool = BlockPool(40, block_size)
    shown = compute(pool, pictures(CAT, DOG))
    seq = sequence(shown.token_ids) if other is None else pictures(*other)
    assert seq.token_ids == shown.token_ids
    assert pool.admit(seq)
    assert seq.num_computed == first_foreign // block_size * block_size


def test_the_same_picture_elsewhere_in_its_placeholders_keeps_apart() -> None:
    """Of a picture cut by a resend: the tokens are equal, the part of the picture is not."""
    pool = BlockPool(40, 2)
    compute(pool, Sequence([7] * 6, SamplingParams(), max_len=100, contents=[Content(range(0, 6), CAT)]))
    other = Sequence([7] * 6, SamplingParams(), max_len=100, contents=[Content(range(1, 6), CAT)])
    assert pool.admit(other)
    assert other.num_computed == 0


def test_contents_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes or more"):
        Content(range(2), b"short")
    for span in (range(3, 3), range(0, 6, 2), range(-1, 2)):
        with pytest.raises(ValueError, match="consecutive tokens"):
            Content(span, CAT)
    for spans in ([range(0, 3), range(2, 4)], [range(4, 6)]):
        with pytest.raises(ValueError, match="of a prompt of 5 tokens overlaps"):
            Sequence([7] * 5, SamplingParams(), max_len=9, contents=[Content(span, CAT) for span in spans])


def test_equal_blocks_behind_different_prefixes_keep_apart() -> None:
    pool = BlockPool(8, 2)
    compute(pool, sequence([1, 2, 7, 7, 5]))
    other = sequence([3, 4, 7, 7, 5])
    assert pool.admit(other)
    assert other.num_computed == 0


def test_colliding_hashes_keep_apart() -> None:
    """-1 and -2 have one hash in Python, so keys that hold them collide unless they are compared."""
    assert hash((0, (-1, -1), b"")) == hash((0, (-2, -2), b""))
    pool = BlockPool(8, 2)
    compute(pool, sequence([-1, -1, 5]))
    other = sequence([-2, -2, 5])
    assert pool.admit(other)
    assert other.num_computed == 0


def test_the_end_of_a_prefix_is_forgotten_first() -> None:
    pool = BlockPool(4, 2)
    pool.release(compute(pool, sequence([1, 2, 3, 4, 5, 6, 7])))  # 3 full blocks, 1 begun
    pool.admit(sequence([9, 9, 9]))  # takes the begun one and the end of the prefix
    again = sequence([1, 2, 3, 4, 5])
    assert pool.admit(again) is False  # 1 block is needed beside the 2 shared ones, which are all that is free
    short = sequence([1, 2, 3])
    assert pool.admit(short)
    assert short.num_computed == 2


def test_the_longest_unused_prefix_is_forgotten_first() -> None:
    pool = BlockPool(4, 2)
    for tokens in ([1, 1, 1], [2, 2, 2]):
        pool.release(compute(pool, sequence(tokens)))
    pool.release(compute(pool, sequence([1, 1, 1])))  # used again
    compute(pool, sequence([8, 8, 8, 8, 8]))
    one, two = sequence([1, 1]), sequence([2, 2, 2])
    assert [len(pool._match(seq)) for seq in (sequence([1, 1, 1]), two)] == [1, 0]
    assert pool.admit(one)


def use_other_weights(pool: BlockPool, seq: Sequence) -> None:
    pool.num_changes += 1


def use_an_adapter(pool: BlockPool, seq: Sequence) -> None:
    seq.adapter = "style@1"


def show_another_picture(pool: BlockPool, seq: Sequence) -> None:
    seq.contents = [Content(range(1, 3), b"b" * 16)]


def salt(pool: BlockPool, seq: Sequence) -> None:
    seq.params = SamplingParams(cache_salt="mine")


def lose_the_state(pool: BlockPool, seq: Sequence) -> None:
    assert pool.states is not None
    for name in list(pool.states._snapshots):
        pool.states.drop(name)


@pytest.mark.parametrize("num_tokens", [4, 2])
def test_a_hit_ends_at_a_state_of_the_same_prefix(num_tokens: int) -> None:
    """A snapshot is known by the name of its block, which stands for the block's whole identity."""
    states = StatePool(4, state_grid=2, block_size=2, interval=4096)
    pool = BlockPool(12, 2, states=states)
    first = compute(pool, sequence([1, 2, 3, 4, 5]))
    first.num_in_state = num_tokens
    pool.release(first)
    for change in (None, use_an_adapter, salt, use_other_weights, lose_the_state):
        seq = sequence([1, 2, 3, 4, 5])
        if change is not None:
            change(pool, seq)
        assert pool.admit(seq)
        assert seq.num_computed == (num_tokens if change is None else 0), change
        pool.release(seq)
        pool.num_changes = 0


@pytest.mark.parametrize("change", [use_other_weights, use_an_adapter, show_another_picture, salt])
def test_a_block_is_found_only_by_its_whole_identity(change: Callable[[BlockPool, Sequence], None]) -> None:
    pool = BlockPool(8, 2)
    first, same, other = (sequence([1, 2, 3, 4, 5]) for _ in range(3))
    for seq in (first, same, other):
        seq.contents = [Content(range(1, 3), b"a" * 16)]
    pool.release(compute(pool, first))
    assert pool.admit(same)
    assert same.num_computed == 4
    change(pool, other)
    assert pool.admit(other)
    assert other.num_computed == 0


def test_a_block_that_nobody_can_share_is_taken_before_any_prefix() -> None:
    pool = BlockPool(3, 2)
    pool.release(compute(pool, sequence([1, 1, 1])))  # a prefix and a block that was only begun
    begun = [compute(pool, sequence([token])) for token in (8, 9)]
    pool.release(begun[0])  # free for a shorter time than the prefix
    compute(pool, sequence([7]))
    assert len(pool._match(sequence([1, 1, 1]))) == 1


def test_tokens_looked_up_and_found_are_counted() -> None:
    pool = BlockPool(8, 2)
    compute(pool, sequence([1, 2, 3, 4, 5]))
    assert (pool.num_queried, pool.num_hit) == (5, 0)
    compute(pool, sequence([1, 2, 3, 4, 9, 9, 9]))
    assert (pool.num_queried, pool.num_hit) == (12, 4)


def test_two_that_compute_the_same_at_once_share_what_follows() -> None:
    pool = BlockPool(16, 2)
    first, second = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 5])
    for seq in (first, second):
        assert pool.admit(seq)
    for seq in (first, second):
        seq.num_computed = 2
        pool.publish(seq)
    assert first.chain == second.chain
    assert first.block_table[0] != second.block_table[0]
    second.num_computed = 4
    pool.publish(second)
    pool.release(second)
    third = sequence([1, 2, 3, 4, 5])
    assert pool.admit(third)
    assert third.num_computed == 4


def test_a_scored_prompt_takes_no_hits() -> None:
    pool = BlockPool(8, 2)
    compute(pool, sequence([1, 2, 3, 4, 5]))
    scored = sequence([1, 2, 3, 4, 5], prompt_logprobs=0)
    assert pool.admit(scored)
    assert scored.num_computed == 0


def test_no_prefix_cache() -> None:
    pool = BlockPool(8, 2, use_prefix_cache=False)
    compute(pool, sequence([1, 2, 3, 4, 5]))
    other = sequence([1, 2, 3, 4, 5])
    assert pool.admit(other)
    assert other.num_computed == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("seed", range(20))
def test_holders_are_counted_right(seed: int) -> None:
    """At any time a block is free, or held by exactly the sequences that list it."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(4, 12), rng.randint(1, 3))
    held: list[Sequence] = []
    for _ in range(200):
        seq = sequence([rng.randint(0, 1) for _ in range(rng.randint(1, 8))])
        if rng.random() < 0.5 and pool.admit(seq, reserve=rng.randint(0, 1)):
            held.append(seq)
            seq.num_computed = rng.randint(seq.num_computed, len(seq.token_ids))
            pool.publish(seq)
        elif held:
            victim = held[rng.randrange(len(held))]
            if rng.random() < 0.5 and pool.grow(victim, len(victim.token_ids) + 1):
                victim.append(rng.randint(0, 1))
                pool.shrink(victim)
            else:
                held.remove(victim)
                pool.release(victim)
        counts = [sum(block in seq.block_table for seq in held) for block in range(pool.num_blocks)]
        assert counts == pool._num_holders
        assert pool.num_free == counts.count(0)
        assert set(pool._keys.values()) == set(pool._prefixes)
    for seq in held:
        pool.release(seq)
    assert pool.num_used == 0


def test_what_stands_behind_placeholders_decides_what_is_shared() -> None:
    """Of the engine's cache and of a draft model's, whose keys would be those of another picture."""
    model, params = MockModel(), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    draft = DraftModel(model=model, tokenizer=ByteTokenizer(), k=2, device="cpu", block_size=4, num_blocks=64)  # type: ignore[arg-type]
    llm = engine(model, speculate=draft)

    def num_cached(digest: bytes) -> tuple[int, int]:
        hits = draft.pool.num_hit
        (seq,) = llm.add([7] * 17, params, contents=[Content(range(8, 16), digest)])
        drain(llm)
        return seq.num_cached, draft.pool.num_hit - hits

    assert [num_cached(digest) for digest in (b"a" * 16, b"b" * 16, b"a" * 16)] == [(0, 0), (8, 8), (16, 16)]
    with pytest.raises(ValueError, match="of a prompt of 2 tokens"):
        llm.add([1, 2], params, contents=[Content(range(1, 3), b"a" * 16)])
