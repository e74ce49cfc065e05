"""Warm-up: all sizes are run, nothing is left behind, no bit changes, and a server is ready only then."""

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, MockModel
from serving import Served, own_process, serving, told, wait_until

from whorl.engine import graph_sizes, warmup
from whorl.engine import graphs as graphs_module
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.warmup import Warming, WarmUp, class_sizes, kind_for, sequence_classes, split
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3
from whorl.serve.engine_thread import EngineThread
from whorl.serve.readiness import Readiness, WarmingUp

SIZES: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 64,
    "max_model_len": 90,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 40,
    "max_prompt_tokens": 24,
    "seed": 11,
}


def engine(**options: Any) -> LLM:
    return LLM(model=MockModel(), **(SIZES | options))


def state(llm: LLM) -> dict[str, Any]:
    """All that a request could see or change."""
    pool, scheduler = llm.pool, llm.scheduler
    return {
        "stats": llm.stats(),
        "free": [*pool._empty, *pool._kept],
        "holders": list(pool._num_holders),
        "prefixes": dict(pool._prefixes),
        "lanes": list(scheduler._lanes),
        "flights": len(llm._flights),
        "seeds": llm._seeds.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "budget": llm.max_prompt_tokens,
        "caches": [tensor.tolist() for cache in llm.runner.caches for tensor in (cache.k, cache.v)],
        "tables": llm.runner.lanes.tables[:-1].tolist(),
        "tokens": llm.runner.lanes.tokens[:-1].tolist(),
        "biases": len(llm.sampler._adjuster._bias_cache),
    }


@pytest.mark.parametrize("kind", ["full", "short"])
def test_nothing_is_left_behind(kind: Any) -> None:
    llm = engine()
    llm.generate(
        [[1, 2, 3, 4, 5, 6, 7, 8, 9]], SamplingParams(max_tokens=9), progress=False
    )  # a prefix is in the cache
    before = state(llm)
    warmed = llm.warm_up(kind, progress=False)
    assert state(llm) == before
    assert (warmed.kind, llm.warmed) == (kind, warmed)
    assert warmed.num_steps > 20
    assert set(warmed.seconds) == {"record", "compile", "sample"}


REQUESTS = [
    ([1, 2, 3], SamplingParams(temperature=0, max_tokens=12)),
    (list(range(40)), SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=12)),
    (list(range(40, 60)), SamplingParams(seed=3, logprobs=3, prompt_logprobs=2, max_tokens=8)),
    ([7, 7, 7, 8], SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={5: 2.0}, max_tokens=9)),
]


def outputs(llm: LLM) -> list[Any]:
    prompts, params = ([each[i] for each in REQUESTS] for i in (0, 1))
    generated = llm.generate(prompts, params, progress=False)
    return [(each.token_ids, each.logprobs, each.prompt_logprobs, each.num_cached) for each in generated]


@pytest.mark.parametrize("kind", ["full", "short"])
@pytest.mark.parametrize("drafting", ["none", "lookup", "model"])
def test_no_bit_changes(kind: Any, drafting: str) -> None:
    def make(**options: Any) -> LLM:
        proposers: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "lookup": lambda: PromptLookup(k=4, min_hist=2),
            "model": lambda: DraftModel(model=MockModel(), k=3, device="cpu", num_blocks=64, block_size=4),
        }
        return engine(speculate=proposers[drafting](), draft_length="fixed", **options)

    warm = make(warmup=kind)
    assert warm.warmed is not None
    plain, actual = outputs(make()), outputs(warm)
    if drafting == "model":  # a drawn draft decides with the target what is sampled: the greedy and the scored remain
        plain, actual = [plain[0], plain[2][2:]], [actual[0], actual[2][2:]]
    assert actual == plain


def test_a_model_with_experts_and_real_attention() -> None:
    model = random_model(Qwen3.tiny(num_experts=8), device="cpu", dtype=torch.float32)
    warm, plain = (LLM(model=model, **(SIZES | {"warmup": kind})) for kind in ("short", None))
    assert outputs(warm) == outputs(plain)


# ---- graphs, as if the CPU recorded them


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(device: str, function: Callable[[], None], *, pool: Any = None) -> Callable[[], None]:
        function()
        return function

    monkeypatch.setattr(graphs_module, "record_graph", record)
    monkeypatch.setattr(graphs_module, "wants_graphs", lambda device, requested: requested is not False)


def run_load(llm: LLM) -> None:
    """Requests of all lengths that come and go, so that steps of every size run."""
    rng = random.Random(5)
    for _ in range(30):
        prompt = [rng.randrange(llm.vocab_size) for _ in range(rng.choice((1, 3, 9, 30, 70)))]
        llm.add(prompt, SamplingParams(max_tokens=rng.randint(1, 16), temperature=rng.choice((0.0, 1.0))))
        for _ in range(rng.randint(0, 3)):
            llm.step()
    while llm.has_work:
        llm.step()


@pytest.mark.parametrize("drafting", [False, True])
def test_after_a_full_warm_up_nothing_is_recorded(
    graphs: None, monkeypatch: pytest.MonkeyPatch, drafting: bool
) -> None:
    monkeypatch.setattr(graph_sizes, "KEYS", 8)
    monkeypatch.setattr(graph_sizes, "BESIDE", (0, 2, 8, 32, 256))
    options = {"speculate": PromptLookup(k=3, min_hist=1, guard=False), "draft_length": "fixed"} if drafting else {}
    options |= {"prompt_graphs": 32}
    llm = engine(warmup="full", **options)
    recorded, prompts = dict(llm.runner.graphs.decoding), dict(llm.runner.graphs.prompts)
    beside = (0, 2, 8, 32) if drafting else (0, 2, 8)
    assert prompts.keys() == {(size, count) for size in (16, 32) for count in beside}
    assert {keys for _, keys in recorded} == {8, 32, 90}
    assert {rows for rows, _ in recorded} == ({1, 2, 4, 8, 16, 32} if drafting else {1, 2, 4, 8})
    run_load(llm)
    assert (llm.runner.graphs.decoding, llm.runner.graphs.prompts) == (recorded, prompts)
    cold = engine(**options)
    run_load(cold)
    assert len(cold.runner.graphs.decoding) > 1, "the load would have recorded"
    assert {count for _, count in cold.runner.graphs.prompts} == set(beside)
    assert cold.runner.graphs.decoding.keys() <= recorded.keys()


def test_a_graph_may_have_more_room_than_a_step(graphs: None) -> None:
    """Prompts and decoding sequences are padded each by themselves."""
    options = {"max_num_batched_tokens": 260, "max_prompt_tokens": 256, "max_model_len": 250, "prompt_graphs": 256}
    llm = engine(warmup="full", **options)
    assert max(llm.runner.graphs.prompts) == (256, 16)
    run_load(llm)


def test_a_short_warm_up_records_the_shortest(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_sizes, "KEYS", 8)
    assert set(engine(warmup="short").runner.graphs.decoding) == {(rows, 8) for rows in (1, 2, 4, 8)}


def test_without_graphs_classes_of_decode_sizes_run() -> None:
    llm = engine(warmup="full")
    llm.model.num_rows.clear()  # type: ignore[attr-defined]
    llm.warm_up("full", progress=False)
    rows = {count for count, entries in llm.model.num_rows if count == entries}  # type: ignore[attr-defined]
    assert {1, 2, 4, 5} <= rows


# ---- sizes


def kind_of(count: int) -> tuple[int, bool, bool]:
    """What kernels are compiled for and chosen by."""
    return (count - 1).bit_length(), count == 1, count % 16 == 0


@pytest.mark.parametrize("limit", [*range(1, 70), 127, 128, 129, 200, 250, 256, 257, 1000, 2047, 2048])
def test_a_size_of_every_class_is_run(limit: int) -> None:
    sizes = class_sizes(limit)
    assert min(sizes) == 1
    assert max(sizes) == limit
    assert {kind_of(count) for count in range(1, limit + 1)} == {kind_of(count) for count in sizes}
    assert len(sizes) <= 2 * limit.bit_length() + 3
    assert set(class_sizes(limit, odd=False)) <= set(sizes)


def test_every_prompt_size_of_the_load_has_its_class() -> None:
    llm = engine(warmup="off", max_num_batched_tokens=80, max_prompt_tokens=70)
    rows: list[tuple[int, int]] = llm.model.num_rows  # type: ignore[attr-defined]
    llm.warm_up("full", progress=False)
    warmed = {(kind_of(count), kind_of(entries)) for count, entries in rows}
    tokens, entries = ({pair[i] for pair in warmed} for i in (0, 1))
    rows.clear()
    run_load(llm)
    assert {kind_of(count) for count, _ in rows} <= tokens
    assert {kind_of(count) for _, count in rows} <= entries


def test_products_of_every_multiple_are_tried() -> None:
    options = {"max_model_len": 512, "num_blocks": 128, "max_num_batched_tokens": 400, "max_prompt_tokens": 390}
    llm = engine(**options)
    for kind, expected in (("full", {128, 256, 384}), ("short", {128, 256})):
        work = WarmUp(llm, kind)  # type: ignore[arg-type]
        descriptions = {task.description for task in work.tasks()}
        assert {n for n in range(128, 400, 128) if f"prompt of {n}" in descriptions} == expected


@pytest.mark.parametrize("size", [1, 89, 90, 200, 2048])
def test_prompts_that_are_too_long_are_split(size: int) -> None:
    prompts = split(size, 89)
    assert sum(new for _, new in prompts) == size
    assert max(new for _, new in prompts) <= 89
    assert len(prompts) == -(-size // 89)


def test_sequences_of_every_kernel_of_attention() -> None:
    assert sequence_classes(32) == [1]
    assert sequence_classes(33) == sequence_classes(256) == [1, 33]
    assert sequence_classes(600) == [1, 33, 257, 513]


# ---- when


def test_what_is_warmed_up_by_default() -> None:
    assert engine().warmed is None
    assert engine(warmup="off").warmed is None
    assert [kind_for(None, device, is_server=True) for device in ("cpu", "cuda", "npu")] == ["off", "full", "full"]
    assert kind_for(None, "cuda", is_server=False) == "off"
    assert kind_for("short", "cpu", is_server=False) == "short"
    with pytest.raises(ValueError, match="warmup is 'much', expected None, 'full', 'short' or 'off'"):
        EngineSettings(warmup="much")  # type: ignore[arg-type]
    assert engine(warmup="full", warm=False).warmed is None


def test_off_runs_nothing() -> None:
    llm = engine()
    llm.model.num_rows.clear()  # type: ignore[attr-defined]
    assert llm.warm_up("off").num_steps == 0
    assert list(WarmUp(llm, "off").run()) == []
    assert not llm.model.num_rows  # type: ignore[attr-defined]


def test_not_while_requests_run() -> None:
    llm = engine()
    llm.add([1, 2, 3])
    with pytest.raises(ValueError, match="requests are running; warm up before the first request"):
        llm.warm_up("short")


def test_tiny_limits() -> None:
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_prompt_tokens": 1, "max_model_len": 2}
    for block_size in (1, 4):
        llm = engine(warmup="full", block_size=block_size, num_blocks=2, **sizes)
        assert llm.generate([[1]], SamplingParams(max_tokens=1), progress=False)[0].token_ids


# ---- a server


class Held:
    """A model whose forward calls wait until they are let go; the first few pass."""

    def __init__(self, llm: LLM, num_free: int) -> None:
        self.go, self.is_held = threading.Event(), threading.Event()
        forward, left = llm.model.forward, itertools.count(num_free, -1)

        def held(step: Any, caches: Any) -> Any:
            if next(left) <= 0:
                self.is_held.set()
                assert self.go.wait(60)
            return forward(step, caches)

        llm.model.forward = held  # type: ignore[method-assign]


@pytest.fixture
def warming() -> Iterator[tuple[Served, Held]]:
    llm = told({"hi": "Hello there!"}, warmup="short", warm=False, max_num_batched_tokens=64, max_num_seqs=4)
    held = Held(llm, 3)
    with serving(llm) as served:
        try:
            assert held.is_held.wait(60)
            yield served, held
        finally:
            held.go.set()


def test_a_server_is_ready_when_it_is_warm(warming: tuple[Served, Held]) -> None:
    served, held = warming
    health = served.http.get("/health")
    status = health.json()
    assert health.status_code == 503
    assert (status["status"], status["done"]) == ("warming_up", 3)
    assert status["total"] > 3
    assert status["error"]["code"] == "warming_up"
    assert 1 <= int(health.headers["Retry-After"]) <= 30
    for path, body in (
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/completions", {"prompt": "ab", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        refused = served.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "warming_up")
        assert "3 of" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) >= 1
    for path in ("/v1/models", "/metrics", "/version"):
        assert served.http.get(path).status_code == 200
    held.go.set()
    wait_until(lambda: served.http.get("/health").status_code == 200)
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.chat("hi")["choices"][0]["message"]["content"] == "Hello there!"
    wait_until(served.is_idle)
    assert served.llm.warmed is not None


def test_a_server_stops_in_the_middle_of_its_warm_up() -> None:
    async def work() -> EngineThread:
        endless = (Warming(1, 2, "again") for _ in itertools.count())
        thread = EngineThread(told(), Any, readiness=Readiness(endless))  # type: ignore[arg-type]
        thread.start()
        while thread.readiness.progress is None:
            await asyncio.sleep(0.001)
        with pytest.raises(WarmingUp, match="1 of 2 steps"):
            thread.check()
        await asyncio.wait_for(thread.stop(), 20)
        return thread

    thread = asyncio.run(work())
    assert not thread._thread.is_alive()
    assert not thread.readiness.is_ready
    assert thread.failure is None


def test_a_failed_warm_up_is_a_failed_engine() -> None:
    def failing() -> Iterator[Warming]:
        yield Warming(1, 2, "first")
        raise MemoryError("the second is too large")

    failures: list[None] = []
    thread = EngineThread(told(), Any, readiness=Readiness(failing()))  # type: ignore[arg-type]
    thread.on_failure = lambda: failures.append(None)
    thread.start()
    thread._thread.join(20)
    assert isinstance(thread.failure, MemoryError)
    assert failures
    assert not thread.readiness.is_ready


def test_ready_is_said_last(tmp_path: Path) -> None:
    arguments = "llm=told(warmup='short', warm=False, max_num_batched_tokens=64, max_num_seqs=2)"
    tell = (
        "import gc; gc.freeze = lambda freeze=gc.freeze: (freeze(), print('kept', gc.get_freeze_count(), flush=True))"
    )
    with (tmp_path / "log").open("wb") as out, own_process(arguments, first=tell, output=out):
        lines = (tmp_path / "log").read_text().splitlines()
    about = [line.split("INFO:")[-1].strip() for line in lines if "warming up" in line or "ready" in line]
    assert about[0].startswith("warming up (short): http://127.0.0.1:")
    assert about[-1].startswith("ready: serving told at http://127.0.0.1:")
    assert any("of" in line for line in about[1:-1]), "where there is no terminal, lines say how far it is"
    kept = [i for i, line in enumerate(lines) if line.startswith("kept ")]
    ready = [i for i, line in enumerate(lines) if "ready: serving" in line]
    assert len(kept) == 1
    assert kept < ready, "no request may wait for a garbage collection over torch's objects"
    assert int(lines[kept[0]].split()[1]) > 50_000


# ---- several ranks


@pytest.mark.slow
def test_every_rank_warms_up(tmp_path: Path) -> None:
    config = Qwen3.tiny(hidden_size=96, intermediate_size=160, num_experts=8)
    (path,) = write_checkpoints(tmp_path, {"tiny": config}).values()
    results = []
    for kind in ("full", None):
        llm = LLM(path, tokenizer=ByteTokenizer(), tp=2, warmup=kind, **SIZES)
        try:
            results.append(outputs(llm))
        finally:
            llm.close()
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "limits", [(8192, 128, 40959), (40, 64, 39), (105, 3, 35), (2048, 64, 20), (16, 4, 500)], ids=str
)
def test_every_graph_that_prompts_can_need_is_recorded(limits: tuple[int, int, int]) -> None:
    """limits: the most tokens of a step, the most sequences, the longest prompt."""
    most_tokens, most_seqs, longest = limits
    sizes = [(tokens, graph_sizes.most_prompts(tokens)) for tokens in graph_sizes.PROMPTS]

    def graph(lengths: list[int]) -> int | None:
        fitting = (tokens for tokens, prompts in sizes if sum(lengths) <= tokens and len(lengths) <= prompts)
        return next(fitting, None)

    rng, needed = random.Random(0), set()
    for _ in range(3000):
        longest_here = rng.choice((1, 3, 20, longest))
        lengths = [rng.randint(1, min(longest, longest_here)) for _ in range(rng.randint(1, min(20, most_seqs)))]
        if sum(lengths) <= most_tokens:
            needed.add(graph(lengths))
    recorded = {graph(lengths) for lengths in warmup.recorded_prompts(sizes, *limits)}
    assert needed - {None} <= recorded
    assert len(recorded) > 1
