"""Several ranks against one, and what happens when one of them is lost. Every rank is a real process, over gloo."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, Logits, MockModel, Oracle, alone, record

from bench import collectives
from whorl import nn
from whorl.device import COLLECTIVE_CHOICES, COLLECTIVE_SETTINGS
from whorl.engine import launch
from whorl.engine.launch import RankError, RankPlace
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import load_model
from whorl.models.deepseek import DeepSeek
from whorl.models.gemma3 import Gemma3
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

WIDE = {"hidden_size": 96, "intermediate_size": 160}  # torch sums a row alone and among others in different orders
CONFIGS = {
    "llama": Llama.tiny(**WIDE, num_attention_heads=6, num_key_value_heads=3, head_dim=16, attention_bias=True),
    "gemma3": Gemma3.tiny(**WIDE),
    "qwen3": Qwen3.tiny(**WIDE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3.tiny(**WIDE, num_experts=8, norm_topk_prob=True),
    "deepseek": DeepSeek.tiny(**WIDE, index_topk=8, num_attention_heads=5, num_hidden_layers=2),
}
LONGEST, BOUND = 40, 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), CONFIGS)


@pytest.fixture
def engine(checkpoints: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    """Makes an engine of two ranks, and ends it."""
    made: list[LLM] = []

    def make(name: str = "llama", **options: Any) -> LLM:
        options = {"tp": 2, "max_num_seqs": 4, "block_size": 4, "num_blocks": 40, "max_model_len": LONGEST} | options
        llm = LLM(
            checkpoints[name],
            tokenizer=ByteTokenizer(),
            device="cpu",
            dtype=torch.float32,
            draft_length="fixed",
            **options,
        )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        processes = ranks(llm)
        llm.close()
        assert all(process.poll() is not None for process in processes), "a rank outlives its engine"


def ranks(llm: LLM) -> list["subprocess.Popen[bytes]"]:
    assert llm._lead is not None
    return list(llm._lead.group._processes.values())


def run(llm: LLM, *requests: tuple[list[int], SamplingParams]) -> list[Sequence]:
    sequences = [llm.add(*request)[0] for request in requests]
    while llm.has_work:
        llm.step()
    return sequences


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share a beginning and repeat themselves; greedy, sampled, with penalties."""
    rng = random.Random(3)
    common = [rng.randrange(97) for _ in range(9)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "top_k": 30, "top_p": 0.95},
        {"temperature": 0, "frequency_penalty": 0.5},
    ]
    for kind in kinds * 2:
        own = [rng.randrange(97) for _ in range(rng.randint(1, 5))]
        prompt = common[: rng.choice((0, 4, 9))] + own * rng.randint(1, 3)
        yield prompt, SamplingParams(max_tokens=rng.randint(6, 16), ignore_eos=True, **kind)


def check_close(actual: Logits, one: Logits, is_same: Callable[[int], bool]) -> float:
    """Up to the first token that may differ, logits are equal to BOUND; the largest error."""
    worst = 0.0
    for place, logits in one.items():
        worst = max(worst, float((actual[place] - logits).abs().max()))
        assert worst < BOUND, f"logits of output {place} are off by {worst}"
        best = logits.topk(2).values
        if not is_same(place):
            assert float(best[0] - best[1]) < 2 * BOUND, f"output {place} is another token by a clear margin"
            break
    return worst


def check_ranks(llm: LLM, path: Path) -> None:
    """Against one rank; then at random, with drafts, preemption and aborts, bit by bit against this engine's own runs
    of one sequence after the other."""
    one_rank: Any = load_model(path, device="cpu", dtype=torch.float32, progress=False)
    recorded, cases = record(llm), list(requests())
    plain, llm.proposer = [], None
    for prompt, params in cases:
        (seq,) = run(llm, (prompt, params))
        expected, logits = alone(one_rank, ByteTokenizer(), prompt, params)
        actual = recorded[seq.id]
        check_close(actual, logits, lambda i, a=seq, b=expected: a.output_ids[i] == b.output_ids[i])  # type: ignore[misc]
        plain.append((seq, actual))
    texts = [seq.token_ids for seq, _ in plain]
    rng = random.Random(11)
    for proposer in (None, Oracle(texts, k=5, wrong=6), PromptLookup(k=6, min_hist=1, guard=False)):
        llm.proposer = proposer
        todo = [rng.randrange(len(cases)) for _ in range(6)]
        added: list[tuple[int, Sequence]] = []
        while todo or llm.has_work:
            while todo and rng.random() < 0.7:
                added.append((todo[-1], llm.add(*cases[todo.pop()])[0]))
            llm.step()
            if added and rng.random() < 0.05:
                llm.abort(rng.choice(added)[1])
        for index, seq in added:
            before, logits = plain[index]
            count = seq.num_outputs
            assert seq.output_ids == before.output_ids[:count]
            for place in range(count):
                assert torch.equal(recorded[seq.id][place], logits[place]), f"{proposer}: output {place} of {seq!r}"
    stats = llm.stats()
    for event in ("num_preemptions", "num_tokens_hit", "num_accepted"):
        assert stats[event] > 0, f"no {event} in these schedules"
    assert stats["num_drafted"] > stats["num_accepted"]
    assert llm.pool.num_used == 0


def sum_in_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large sums are: to each rank its rows, then their sums to all."""
    monkeypatch.setattr(nn.ranks, "_FEW_BYTES", 0)
    planted(monkeypatch, "import whorl.nn\nwhorl.nn.ranks._FEW_BYTES = 0")


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("deepseek", "gemma3", "qwen3", "qwen3_moe")), "llama"],
)
def test_two_ranks_equal_one(
    name: str, engine: Callable[..., LLM], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 KV heads, and 5 heads that share latents, are shared unevenly by two ranks, 2 KV heads evenly."""
    if name == "qwen3_moe":
        sum_in_two_turns(monkeypatch)
    options: dict[str, Any] = {"num_blocks": 13, "run_ahead": name == "qwen3", "speculate": PromptLookup()}
    check_ranks(engine(name, **options), checkpoints[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_four_ranks_equal_one(name: str, engine: Callable[..., LLM], checkpoints: dict[str, Path]) -> None:
    """Some KV heads are on two ranks."""
    check_ranks(engine(name, num_blocks=13, tp=4, speculate=PromptLookup()), checkpoints[name])


def check_scores(llm: LLM, path: Path) -> None:
    """Prompt scores come from a head that is computed outside of a call."""
    model: Any = load_model(path, device="cpu", dtype=torch.float32, progress=False)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2, ignore_eos=True)
    prompt = [3, 14, 15, 92, 65]
    (seq,) = run(llm, (prompt, params))
    one, _ = alone(model, ByteTokenizer(), prompt, params)
    assert len(seq.prompt_logprobs) == 4
    for ours, theirs in zip(seq.prompt_logprobs + seq.logprobs, one.prompt_logprobs + one.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=BOUND)
        assert ours.token_id == theirs.token_id


def check_interrupts(llm: LLM) -> None:
    """After Ctrl-C the engine works as before."""
    expected = llm.generate([[1, 2, 3]], GREEDY, progress=False)[0].token_ids
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for delay in (0.003, 0.01, 0.02):
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
            for _ in range(200):
                llm.generate([[4, 5, 6]], long, progress=False)
        assert llm.generate([[1, 2, 3]], GREEDY, progress=False)[0].token_ids == expected


@pytest.mark.slow
def test_both_ways_to_sum_give_the_same_bits(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for _ in range(2):
        llm = engine("qwen3", tp=3)
        recorded = record(llm)
        (seq,) = run(llm, (list(range(20)), GREEDY))
        outputs.append(recorded[seq.id])
        llm.close()
        sum_in_two_turns(monkeypatch)
    assert len(outputs[0]) == 12
    assert all(torch.equal(outputs[0][place], outputs[1][place]) for place in outputs[0])


# ---- loss


def expect_loss(llm: LLM, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=message):  # noqa: PT012
        while time.monotonic() < started + 40:
            run(llm, ([1, 2, 3], GREEDY))
    assert time.monotonic() < started + 30
    assert all(process.poll() is not None for process in ranks(llm))


def planted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Ranks run this before they follow."""
    monkeypatch.setattr(
        launch, "COMMAND", [sys.executable, "-c", f"{code}\nfrom whorl.engine.launch import *\nfollow()"]
    )


def test_an_engine_until_a_rank_is_killed(engine: Callable[..., LLM], checkpoints: dict[str, Path]) -> None:
    token = 2 * 2 * 3 * 16 * 4  # bytes: layers, k and v, KV heads, head size, fp32, of the whole model
    llm = engine(num_blocks=None, memory=2 * token * 40)
    assert llm.pool.num_blocks == 3 * 40 // 4, "the cache fits the rank that has 2 of 3 KV heads"
    check_scores(llm, checkpoints["llama"])
    assert llm.measure_cost(4).keys() == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="close the other engine first"):
        engine()
    check_interrupts(llm)
    killer = threading.Timer(0.05, ranks(llm)[0].kill)
    killer.start()
    expect_loss(llm, r"rank 1 was killed by signal 9")
    killer.join()
    llm.add([1], GREEDY)
    with pytest.raises(RankError, match="killed by signal 9"):
        llm.step()


RAISE = """
from whorl.engine.runner import Runner
run_call, calls = Runner.run_call, []
def failing(self, call, *states):
    calls.append(call)
    if len(calls) == 5:
        raise ValueError("the planted fault")
    return run_call(self, call, *states)
Runner.run_call = failing
"""


def test_a_rank_that_raises_ends_the_run_with_its_traceback(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, RAISE)
    llm = engine()
    expect_loss(llm, r"(?s)rank 1 failed:\nTraceback.*in failing\n.*ValueError: the planted fault")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(7)", "rank 1 ended with exit code 7"),
        pytest.param(
            "import whorl.engine.weights as w\nw.fill = None",
            "(?s)rank 1 failed:\nTraceback.*TypeError",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["at once", "while loading"],
)
def test_a_rank_that_fails_early(
    code: str, message: str, engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, code)
    started = time.monotonic()
    with pytest.raises(RankError, match=message):
        engine()
    assert time.monotonic() < started + 30
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_rank_that_stops_is_not_waited_for_for_ever(
    engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_TURN", launch.timedelta(seconds=4))
    llm = engine()
    ranks(llm)[0].send_signal(signal.SIGSTOP)
    expect_loss(llm, "a rank did not answer within 4 s, and none has failed")


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from mock_model import ByteTokenizer
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams

llm = LLM({path!r}, tokenizer=ByteTokenizer(), device="cpu", tp=2, num_blocks=40)
print(*[process.pid for process in llm._lead.group._processes.values()], flush=True)
while True:
    out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), progress=False)
    if sys.argv[1] == "once":
        break
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(None, 0, id="normal"),
        pytest.param(signal.SIGINT, -signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="kill"),
    ],
)
@pytest.mark.slow
def test_no_rank_outlives_the_program(end: signal.Signals | None, code: int, checkpoints: dict[str, Path]) -> None:
    """It has no guard of its main module either."""
    text = PROGRAM.format(tests=str(ROOT / "tests" / "helpers"), path=str(checkpoints["llama"]))
    arguments = [sys.executable, "-c", text, "once" if end is None else "for ever"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT) as program:
        assert program.stdout is not None
        (pid,) = map(int, program.stdout.readline().split())
        if end is signal.SIGINT:
            os.killpg(program.pid, end)  # as a terminal does
        elif end is not None:
            program.send_signal(end)
        try:
            assert program.wait(60) == code
        finally:
            program.kill()  # leaving the block waits without a limit
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


# ---- how ranks come about


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert RankPlace.find() == RankPlace(rank=0, size=1, local_rank=0, is_external=False)
    assert RankPlace.find(4) == RankPlace(rank=0, size=4, local_rank=0, is_external=False)
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_ADDR": "host", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert RankPlace.find() == RankPlace.find(8) == RankPlace(rank=5, size=8, local_rank=1, is_external=True)
    assert RankPlace.find(1).size == 1
    with pytest.raises(ValueError, match="tp is 2, and torchrun has started 8 ranks"):
        RankPlace.find(2)


def test_more_ranks_than_heads_start_nothing(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_spawn", None)
    with pytest.raises(ValueError, match="query heads: 6 cannot be shared by 7 ranks: take 6 or fewer"):
        engine(tp=7)
    with pytest.raises(ValueError, match="tp or ep is 2, expected 1 for a model that is passed as an object"):
        LLM(model=MockModel(), device="cpu", tp=2)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["torchrun", "--tp 2", "TP_SIZE"])
def test_the_default_model(by: str) -> None:
    """9 query heads and 3 KV heads, on two ranks."""
    words = "generate -n 8 --temperature 0 --json --device cpu --prompt"
    arguments = [*words.split(), "The capital of France is"]
    texts = []
    for size in (1, 2):
        command, environment = [sys.executable, "-m", "whorl"], dict(os.environ)
        if size == 2 and by == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
            command.append("whorl")
        elif size == 2 and by == "TP_SIZE":
            environment["TP_SIZE"] = "2"
        options = by.split() if size == 2 and by == "--tp 2" else []
        done = subprocess.run(
            [*command, *arguments, *options], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
        )
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]


@pytest.mark.slow
def test_a_rank_of_torchrun_that_raises_ends_the_run(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    text = RAISE.replace("if len(calls) == 5", "import os\n    if len(calls) == 5 and os.environ['RANK'] == '1'")
    program = PROGRAM.replace(", tp=2", "").replace("print(*", "0 and print(*").replace("llm._lead", "0 and llm._lead")
    script = tmp_path / "program.py"
    script.write_text(text + program.format(tests=str(ROOT / "tests" / "helpers"), path=str(checkpoints["llama"])))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script), "on"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)  # collectives wait longer
    assert done.returncode != 0
    assert "ValueError: the planted fault" in done.stderr, done.stderr


# ---- settings of the libraries, and what they are worth


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_settings_are_made_and_said_in_a_line(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = COLLECTIVE_SETTINGS[device]
    for name in settings:
        monkeypatch.setenv(name, "mine")
        monkeypatch.delenv(name)
    if device == "npu":
        assert len(settings) == 6
        monkeypatch.setenv("HCCL_BUFFSIZE", "128")
    monkeypatch.setattr(launch, "device_count", lambda device: 2)
    monkeypatch.setattr(launch, "Address", None)  # nothing is started
    with pytest.raises(AttributeError):
        launch.start(RankPlace(rank=0, size=2, local_rank=0, is_external=False), device, "none", {})
    (line,) = caplog.messages
    for name, value in settings.items():
        is_mine = (device, name) == ("npu", "HCCL_BUFFSIZE")
        assert os.environ[name] == ("128" if is_mine else value)
        assert (f"{name}={value}" in line) != is_mine


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_count", lambda device: 2)
    with pytest.raises(ValueError, match="tp is 4; this machine has 2 cuda devices"):
        launch.start(RankPlace(rank=0, size=4, local_rank=0, is_external=False), "cuda", "none", {})
    monkeypatch.setattr(collectives, "device_count", lambda device: 1)
    monkeypatch.setattr(collectives, "require", lambda device: device)
    with pytest.raises(ValueError, match=r"--ranks is 1, expected at least 2.* has 1 cuda device"):
        collectives.check("cuda", None)


def test_every_setting_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COLLECTIVE_CHOICES["npu"]:
        monkeypatch.delenv(name, raising=False)
    swept = list(collectives.settings("npu"))
    assert [(name, tune) for name, _, tune in swept[:2]] == [(collectives.PLAIN, False), (collectives.OURS, True)]
    assert {name for _, variables, _ in swept for name in variables} == set(COLLECTIVE_SETTINGS["npu"])
    monkeypatch.setenv("HCCL_ALGO", "mine")
    assert not any("HCCL_ALGO" in variables for _, variables, _ in collectives.settings("npu"))
    assert list(collectives.settings("cpu")) == [(collectives.PLAIN, {}, False)]


def test_a_wrong_answer_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "import whorl.nn\ngather = whorl.nn.Ranks.gather\nwhorl.nn.Ranks.gather = lambda s, x: gather(s, x + 1)"
    planted(monkeypatch, fault)
    rows = collectives.measure({"device": "cpu", "ranks": 2, "rows": [1, 5], "repeats": 2, "tune": True})
    assert [row["rows"] for row in rows] == [2] * 5 + [6] * 5
    for row in rows:
        is_right = row["collective"] != "gather of columns"
        assert row["equal"] == is_right, row
        assert (row["us"] is not None) == (row["algbw"] is not None) == is_right
        assert row["bytes"] == row["rows"] * collectives.WIDTH * 4
        assert row["sent"] == row["bytes"] * (1 if row["collective"] in ("all_reduce", "sum in rank order") else 0.5)
