"""Steps stay short where prompts are slow, whatever that costs in steps; and it can be seen how far a prompt is."""

import io
import sys
from typing import Any

import pytest
from serving import ALPHABET, byte_tokenizer, serving, told, wait_until

from whorl.chat.terminal import stream
from whorl.engine import llm as llm_module
from whorl.engine.scheduler import StepBudget
from whorl.engine.sequence import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def after(budget: StepBudget, seconds_a_token: float, *, steps: int, overhead: float = 0.0) -> list[int]:
    """The budgets of these full steps of a machine that fast."""
    budgets = []
    for _ in range(steps):
        budgets.append(budget.tokens)
        budget.observe(budget.tokens, overhead + budget.tokens * seconds_a_token)
    return budgets


def test_it_follows_the_machine() -> None:
    assert after(StepBudget(2048, device="cpu"), 0.01, steps=3) == [32, 32, 32]  # 50 tokens in half a second
    assert after(StepBudget(2048, device="cpu"), 0.001, steps=4) == [32, 128, 480, 480]
    assert after(StepBudget(2048, device="cpu"), 1e-6, steps=5) == [32, 128, 512, 2048, 2048]
    assert after(StepBudget(100, device="cpu"), 1e-6, steps=3) == [32, 100, 100]
    budget = StepBudget(2048, device="cpu")
    after(budget, 0.001, steps=3)
    assert after(budget, 0.01, steps=2) == [480, 32]  # it has become busy
    assert after(budget, 0.001, steps=2) == [32, 128]


def test_a_step_with_little_in_it_says_little() -> None:
    budget = StepBudget(2048, device="cpu")
    after(budget, 0.001, steps=3)
    budget.observe(3, 0.1)  # most of it reading the weights
    assert budget.tokens == 480
    budget.observe(3, 5.0)
    assert budget.tokens == 32


def test_where_it_is_fixed() -> None:
    assert after(StepBudget(2048, device="cuda"), 1.0, steps=2) == [2048, 2048]
    assert after(StepBudget(2048, device="cpu", fixed=100), 1.0, steps=2) == [100, 100]
    with pytest.raises(
        ValueError, match="max_prompt_tokens is 4096, expected 1 to max_num_batched_tokens, which is 2048"
    ):
        StepBudget(2048, device="cpu", fixed=4096)
    assert told(max_prompt_tokens=7)._budget.tokens == 7


def test_a_slow_engine_takes_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine's clock a prompt token takes 1/100 second; the answer is the same as in one step."""
    clock, computed = [0.0], []
    llm = told(num_blocks=128)
    run = llm.runner.run

    def timed(batch: Any) -> Any:
        computed.append(sum(chunk.length for chunk in batch.chunks))
        clock[0] += computed[-1] * 0.01
        return run(batch)

    monkeypatch.setattr(llm.runner, "run", timed)
    monkeypatch.setattr(llm_module.time, "perf_counter", lambda: clock[0])
    prompt = byte_tokenizer().encode(ALPHABET * 8)
    (output,) = llm.generate([prompt], GREEDY, progress=False)
    assert computed == [32] * 6 + [16] + [1] * 3
    (whole,) = told(max_prompt_tokens=2048).generate([prompt], GREEDY, progress=False)
    assert output.text == whole.text == "abcd"


def test_prompts_go_on_beside_many_that_decode() -> None:
    """More of these than the budget: what they take does not count against prompts."""
    llm = told(max_prompt_tokens=8, max_num_batched_tokens=64)
    decoding = [llm.add("a", SamplingParams(temperature=0, max_tokens=30))[0] for _ in range(16)]
    while any(seq.num_outputs == 0 for seq in decoding):
        llm.step()
    (late,) = llm.add("a" * 24, GREEDY)
    for _ in range(3):
        llm.step()
    assert late.num_outputs == 1
    assert not any(seq.is_finished for seq in decoding)


def test_a_stream_moves_while_another_prompt_is_read() -> None:
    with serving(told(delay=0.01, max_prompt_tokens=16, num_blocks=256)) as served:
        body = {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            before = served.llm.num_steps
            assert served.complete("a" * 320, max_tokens=1)["choices"][0]["text"] == "b"
            assert served.llm.num_steps - before >= 20
            assert len(list(lines)) == 60  # with [DONE]
    wait_until(served.is_idle)


# ---- what is seen of it


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", shown := Terminal() if is_terminal else io.StringIO())
    llm = told(max_prompt_tokens=16)
    (seq,) = llm.add("a" * 40, GREEDY)
    pieces: list[str] = []
    stream(llm, seq, pieces.append)
    assert "".join(pieces) == "bcde"
    seen = shown.getvalue()
    assert ("16/40" in seen, "32/40" in seen) == (is_terminal, is_terminal)
    assert not seen or seen.rstrip().endswith("\x1b[2K")  # the line is empty again
    assert "\x1b[?25l" not in seen or "\x1b[?25h" in seen  # and the cursor back


def test_a_short_prompt_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    llm = told(max_prompt_tokens=16)
    stream(llm, llm.add("a" * 16, GREEDY)[0], lambda text: None)
    assert shown.getvalue() == ""
