"""`whorl generate`: what its options become, what it refuses, and that the default model answers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from default_model import Scripted, default_llm, mock_llm
from typer.testing import CliRunner

import whorl
import whorl.engine.llm
from whorl.chat import command
from whorl.chat.command import Options, sampling
from whorl.chat.options import ChatOptions, SamplingOptions
from whorl.cli import app
from whorl.engine.drafting import DraftOptions
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.extras import how_to_install

FRANCE = "What is the capital of France?"


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], **options)


@pytest.fixture
def with_llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an engine in the place of the one the command would load."""
    return lambda llm: monkeypatch.setattr(command, "load", lambda options: llm)


# ---- asking wrongly


@pytest.mark.parametrize(
    "arguments", ["--temperature -1", "--top-p 1.5", "--max-tokens 0", "--tp 0", "--device abacus", "--wrong"]
)
def test_values_that_cannot_be(arguments: str) -> None:
    assert run("--prompt", "x", *arguments.split()).exit_code == 2


def test_tensor_parallelism_by_environment() -> None:
    assert "shared by 11 ranks" in run("--prompt", "x", "--device", "cpu", env={"TP_SIZE": "11"}).stderr


def test_prompts_the_engine_refuses(with_llm: Any) -> None:
    with_llm(mock_llm(max_model_len=16))
    for arguments, message in {
        ("--prompt", ""): "prompt: it has 0 tokens",
        ("--prompt", "a b c " * 9): "tokens leave no room for an answer",
        ("--prompt", "a", "-n", "99"): "max_tokens 99 make 100",
    }.items():
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else real(name))
    result = run("--prompt", "x")
    assert result.exit_code == 2
    assert f"generate needs jinja2: {how_to_install('engine')}" in result.stderr


# ---- what options become


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What engines were asked for with."""
    calls: list[dict[str, Any]] = []

    def fake(path: str | None, settings: EngineSettings, **options: Any) -> Scripted:
        calls.append({"path": path, "settings": settings, **options})
        return Scripted("Yes.")

    monkeypatch.setattr(whorl.engine.llm, "LLM", fake)
    return calls


def test_the_engine_it_asks_for(made: list[dict[str, Any]]) -> None:
    arguments = "some/folder --max-seq 64 --device cpu --dtype float32 --pld --pld-k 4 --pld-ngram 2 --pld-min-hist 0"
    more = "--pld-guard-distinct 5 --pld-guard-tail 7 --pld-loop-warn 9 --prompt x --tp 1 --max-step-tokens 4000"
    assert run(*arguments.split(), *more.split()).stdout == "Yes.\n"
    proposer = made[0].pop("speculate")
    assert isinstance(proposer, PromptLookup)
    names = ("k", "ngram", "min_hist", "guard", "guard_distinct", "guard_tail", "loop_warn")
    assert [getattr(proposer, name) for name in names] == [4, 2, 0, True, 5, 7, 9]
    settings = EngineSettings(
        device="cpu", dtype="float32", max_model_len=64, max_num_seqs=1, tp=1, max_prompt_tokens=4000
    )
    assert made == [{"path": "some/folder", "settings": settings, "draft_length": "measured"}]
    assert settings.step_tokens == 4000
    run("--model-dir", "an/other", "-p", "x", "--pld", "--pld-no-guard")
    assert (made[1]["path"], made[1]["speculate"].guard) == ("an/other", False)
    run("-p", "x")
    assert (made[2]["path"], made[2]["speculate"]) == (None, None)
    assert made[2]["settings"] == EngineSettings(max_num_seqs=1)
    assert (made[2]["settings"].step_tokens, made[2]["settings"].max_prompt_tokens) == (2048, None)


def test_lookup_defaults() -> None:
    """Those of the program whose options these are."""
    proposer = DraftOptions(pld=True).proposer()
    names = ("k", "ngram", "min_hist", "guard", "guard_distinct", "guard_tail", "loop_warn")
    assert [getattr(proposer, name) for name in names] == [10, 1, 20, True, 3, 6, 8]


def test_sampling_is_asked_or_advised_or_greedy() -> None:
    llm: Any = Scripted()
    assert sampling(Options(), llm) == SamplingParams(temperature=0, max_tokens=command.DEFAULT_TOKENS)
    assert sampling(Options(chat=ChatOptions(chat=True, interactive=True)), llm).max_tokens is None
    options = SamplingOptions(max_tokens=5, temperature=0.7, top_k=3, top_p=0.8, min_p=0.1, seed=9)
    assert sampling(Options(sampling=options), llm) == SamplingParams(
        max_tokens=5, temperature=0.7, top_k=3, top_p=0.8, min_p=0.1, seed=9
    )
    llm.tokenizer.sampling = {"temperature": 0.6, "top_k": 20}
    try:
        advised = sampling(Options(sampling=SamplingOptions(top_k=1)), llm)
    finally:
        llm.tokenizer.sampling = {"temperature": 0.0}
    assert (advised.temperature, advised.top_k) == (0.6, 1)


def test_seed_0_is_another_one_each_time(with_llm: Any) -> None:
    def texts(seed: int) -> set[str]:
        outputs = set()
        for _ in range(3):
            with_llm(mock_llm())
            outputs.add(run("-p", "Once", "--temperature", "5", "-n", "6", "--seed", str(seed)).stdout)
        return outputs

    assert len(texts(0)) == 3
    assert len(texts(5)) == 1
    assert texts(5) != texts(6)


# ---- what it prints


def test_prompt_file_and_standard_input(with_llm: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("caf\u00e9 'quoted' \"$HOME\"\n", encoding="utf-8")
    llm = Scripted("one", "two", "three", "four")
    with_llm(llm)
    assert run("-f", str(file)).stdout == "one\n"
    assert run("-f", "-", input="from a pipe\n").stdout == "two\n"
    assert run(input="by echo\n").stdout == "three\n"
    assert run("-p", "asked", input="not read").stdout == "four\n"
    prompts = [llm.tokenizer.decode(seq.token_ids[: seq.prompt_len]) for seq in llm.added]
    assert prompts == [file.read_text(encoding="utf-8"), "from a pipe\n", "by echo", "asked"]


def test_chat_with_a_prompt_answers_it_and_ends(with_llm: Any) -> None:
    llm = Scripted("one")
    with_llm(llm)
    done = CliRunner().invoke(app, ["chat", "a/model", "Hi", "--system", "Be kind."], input="not read")
    assert (done.exit_code, done.stdout) == (0, "one\n"), done.stderr
    (seq,) = llm.added
    text = llm.tokenizer.decode(seq.token_ids[: seq.prompt_len], skip_special=False)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert seq.params.max_tokens is None, "as many as fit"
    refused = CliRunner().invoke(app, ["chat", "a/model", "Hi", "--reset"])
    assert "--reset needs a conversation" in refused.stderr


def test_chat_writes_the_template(with_llm: Any) -> None:
    llm = Scripted("one", "two")
    with_llm(llm)
    run("--chat", "--system", "Be kind.", "-p", "Hi")
    run("-p", "Hi")
    chat, plain = (llm.tokenizer.decode(s.token_ids[: s.prompt_len], skip_special=False) for s in llm.added)
    system, user = "<|im_start|>system\nBe kind.<|im_end|>\n", "<|im_start|>user\nHi<|im_end|>\n"
    assert (chat, plain) == (f"{system}{user}<|im_start|>assistant\n", "Hi")


def test_json(with_llm: Any) -> None:
    with_llm(Scripted("Hello world"))
    document = json.loads(run("-p", "Hi", "--json").stdout)
    speed = document.pop("tokens_per_second"), document.pop("time_to_first_token")
    assert all(value > 0 for value in speed)
    assert document == {
        "text": "Hello world",
        "prompt_token_ids": [26843],
        "logprobs": [],  # of an engine that computes none
        "token_ids": [19556, 905, 2],
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }


def test_no_stream_prints_once(with_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.chat.terminal import Screen

    pieces: list[str] = []
    write = Screen.write
    monkeypatch.setattr(Screen, "write", lambda self, text, **how: (pieces.append(text), write(self, text, **how))[1])
    with_llm(Scripted("Hello world", "Hello world"))
    assert run("-p", "x").stdout == run("-p", "x", "--no-stream").stdout == "Hello world\n"
    assert [piece for piece in pieces if piece] == ["Hello", " world", "\n", "Hello world", "\n"]


# ---- the default model


def test_the_capital_of_france(with_llm: Any) -> None:
    with_llm(default_llm())
    assert run("--chat", "--prompt", FRANCE).stdout == "The capital of France is Paris.\n"


def test_lookup_does_not_change_the_text(with_llm: Any) -> None:
    text = "one two three four one two three four one two three four one two"
    with_llm(default_llm())
    plain = json.loads(run("-p", text, "-n", "8", "--json").stdout)
    llm = default_llm(speculate=PromptLookup(min_hist=4), draft_length="fixed")
    with_llm(llm)
    drafted = json.loads(run("-p", text, "-n", "8", "--json").stdout)
    assert drafted["text"] == plain["text"]
    assert drafted["accepted_tokens"] > 0 == plain["accepted_tokens"]


TWENTY = (
    FRANCE,
    "List the days of the week, then list them again in reverse.",
    "Write a haiku about the sea.",
    "Count from one to twenty in words.",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a fox who",
    "Explain photosynthesis in one paragraph.",
    "Repeat this list: apple, banana, cherry, orange, grape, melon, plum.",
    "Translate to French: Good morning, how are you?",
    "The three laws of motion are: 1.",
    "Write an email to a colleague about a meeting on Monday. Subject: Meeting on Monday\n\nDear colleague,",
    "SELECT name, age FROM people WHERE",
    "What is 17 times 23? Show your work.",
    "one two three four one two three four one two three",
    "Name five rivers of Europe and five rivers of Asia.",
    "<html>\n<head>\n<title>My page</title>\n</head>\n<body>\n",
    "Who wrote Hamlet, and when?",
    "Give a recipe for pancakes with a list of ingredients.",
    "A, B, C, D, E, F,",
    "Summarize: The cat sat on the mat. The cat was happy. The mat was red. The cat liked the red mat.",
)


@pytest.mark.slow
def test_lookup_prints_the_same_for_twenty_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts of measured length, and with as many as there can be."""
    monkeypatch.setattr(command, "load", loaded := Loaded())
    assert len(set(TWENTY)) == 20
    for prompt in TWENTY:
        is_message = prompt.endswith((".", "?"))
        arguments = ["--prompt", prompt, "--temperature", "0", "-n", "24", *(["--chat"] if is_message else [])]
        plain = run(*arguments)
        assert plain.exit_code == 0
        assert plain.stdout.strip(), prompt
        assert run(*arguments, "--pld").stdout == plain.stdout
        assert run(*arguments, "--pld", "--pld-min-hist", "1", "--draft-fixed").stdout == plain.stdout
    assert loaded.num_accepted > 50


class Loaded:
    """What the command loads, but the weights only once."""

    def __init__(self) -> None:
        self.num_accepted = 0  # by engines before the latest
        self._latest: Any = None

    def __call__(self, options: Options) -> Any:
        self.num_accepted += 0 if self._latest is None else self._latest.num_accepted
        drafting = options.drafting
        self._latest = default_llm(speculate=drafting.proposer(), draft_length=drafting.draft_length)
        return self._latest


@pytest.mark.slow
def test_from_a_shell() -> None:
    arguments = [sys.executable, "-m", "whorl", "generate", "--chat", "--prompt", FRANCE]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr


# ---- the package


def test_the_package_exports_the_engine() -> None:
    assert whorl.LLM is whorl.engine.llm.LLM
    assert whorl.SamplingParams is SamplingParams


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from whorl.cli import app
for command in (["generate"], ["chat"], ["serve"], ["bench", "decode"]):
    try:
        app([*command, "--help"])
    except SystemExit as stop:
        assert not stop.code
print([name for name in ("torch", "numpy", "tokenizers", "jinja2", "gguf") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "--pld-guard-distinct" in done.stdout
