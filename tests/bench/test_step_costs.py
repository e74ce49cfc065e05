"""What a step of the engine costs the host: as much for long sequences as for short ones."""

import sys
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Any

import pytest
from mock_model import Script

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.speculate import Draft, Proposer

BLOCK, BATCH = 4, 3


class Long(Script):
    max_length = 1 << 14


class Rejected(Proposer):
    k = 3

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        return [Draft([1, 2, 3][:k]) for _ in sequences]


class Counted(MutableSequence[int]):
    """A list that counts the elements that are read from it."""

    def __init__(self, values: list[int]) -> None:
        self.values, self.num_read = values, 0

    def __getitem__(self, index: Any) -> Any:
        part = self.values[index]
        self.num_read += len(part) if isinstance(index, slice) else 1  # type: ignore[arg-type]
        return part

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self.values)
        return iter(self.values)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.values[index]

    def __len__(self) -> int:
        return len(self.values)

    def insert(self, index: int, value: int) -> None:
        self.values.insert(index, value)


def decoding(context: int, num_tokens: int, **options: Any) -> tuple[LLM, list[Seq]]:
    """Return an engine and sequences that have their first token, with a model that costs nothing."""
    num_blocks = BATCH * (context // BLOCK + 20)
    sizes = {"block_size": BLOCK, "num_blocks": num_blocks, "max_num_seqs": BATCH, "draft_length": "fixed"}
    llm = LLM(model=Long(context, []), device="cpu", max_prompt_tokens=2048, **sizes, **options)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    sequences = [llm.add([i + 1, *(j % 200 for j in range(context - 1))], params)[0] for i in range(BATCH)]
    while not all(seq.num_outputs for seq in sequences):
        llm.step()
    return llm, sequences


@pytest.mark.parametrize("use_prefix_cache", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ahead", "drafts"])
def test_a_step_reads_no_more_of_a_long_sequence(kind: str, use_prefix_cache: bool) -> None:
    def num_read(context: int) -> int:
        options: dict[str, Any] = {"run_ahead": kind == "ahead", "use_prefix_cache": use_prefix_cache}
        llm, sequences = decoding(context, 40, speculate=Rejected() if kind == "drafts" else None, **options)
        lists = []
        for seq in sequences:
            seq.token_ids, seq.block_table = Counted(seq.token_ids), Counted(seq.block_table)  # type: ignore[assignment]
            lists += [seq.token_ids, seq.block_table]
        for _ in range(2 * BLOCK):
            llm.step()
        assert (llm.num_drafted > 0) == (kind == "drafts")
        return sum(each.num_read for each in lists)  # type: ignore[attr-defined]

    assert 0 < num_read(64) == num_read(4096)


@pytest.mark.parametrize("use_prefix_cache", [False, True])
def test_the_end_of_a_long_sequence_makes_no_call_for_each_block(use_prefix_cache: bool) -> None:
    """Other sequences wait until its blocks are freed."""

    def num_calls(context: int) -> int:
        llm, _ = decoding(context, 3, use_prefix_cache=use_prefix_cache)
        count = 0

        def called(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            while llm.has_work:
                llm.step()
        finally:
            sys.setprofile(None)
        assert llm.pool.num_used == 0
        return count

    num_calls(8)  # whatever is done once
    assert num_calls(4096) < num_calls(64) + 4096 // BLOCK
