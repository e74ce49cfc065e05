"""Blocks beyond the device: logits have the bits of an engine without, after a copy to the host and after a restart."""

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, Logits, Oracle, alone, record
from schedules import LONGEST, MODELS, compare, random_settings, requests, run_at_random, tiny
from test_delta_states import SIZES, lively

from whorl import nn
from whorl.engine import offload
from whorl.engine.host_blocks import BlockFiles, Carry, FileMove, HostBlocks, check_sums
from whorl.engine.llm import LLM
from whorl.engine.offload import Offload, Sizes
from whorl.engine.sequence import Content, SamplingParams, Sequence
from whorl.engine.weights import build, random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.qwen3 import Qwen3
from whorl.models.qwen3_5 import Qwen3_5Text

Run = tuple[Sequence, Logits]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (lambda: tiny(Qwen3), {}),
    "window": (MODELS["qwen3_window"], {}),
    "int8": (lambda: tiny(Qwen3), {"kv_cache_dtype": "int8"}),
    "fp8": (lambda: tiny(Qwen3), {"kv_cache_dtype": "fp8"}),
    "latent": (lambda: tiny(DeepSeek, index_topk=8, num_hidden_layers=2), {}),
    "latent_fp8": (lambda: tiny(DeepSeek, index_topk=8, num_hidden_layers=2), {"kv_cache_dtype": "fp8"}),
    "states": (lambda: lively(tiny(Qwen3_5Text, **SIZES)), {"num_snapshots": 2}),
}
QUICK = ("plain", "int8", "states")


def tokens(seed: int, count: int = 150) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(count)]


def engine(model: Any, **options: Any) -> LLM:
    """An engine whose device holds one prompt of these tests."""
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 12, "max_model_len": 180, "max_num_seqs": 2}
    return LLM(model=model, device="cpu", **{**sizes, **options})


def run(llm: LLM, prompt: list[int], params: SamplingParams = PARAMS) -> Run:
    logits = record(llm)
    (seq,) = llm.add(prompt, params)
    while llm.has_work:
        llm.step()
    return seq, logits[seq.id]


def same(actual: Run, expected: Run) -> None:
    compare(*expected, *actual)
    assert len(actual[1]) == len(expected[1])


def check_bits(model: Any, folder: Path, options: dict[str, Any]) -> None:
    """A prompt alone, after it was displaced and fetched, with its answer, and after a restart."""
    first, other = tokens(0), tokens(1)
    expected = alone(model, None, first, PARAMS, **{k: v for k, v in options.items() if k == "kv_cache_dtype"})
    llm = engine(model, kv_offload_dir=str(folder), **options)
    same(run(llm, first), expected)
    run(llm, other)
    assert llm.stats()["num_blocks_spilled"] >= 18
    again = run(llm, first)
    assert again[0].num_cached >= 128
    assert llm.stats()["num_blocks_fetched"] >= 6
    same(again, expected)
    longer = [*first, *expected[0].output_ids, *tokens(2, 5)]
    expected_longer = run(engine(model, use_prefix_cache=False, **options | {"num_snapshots": None}), longer)
    same(run(llm, longer), expected_longer)
    llm.close()
    fresh = engine(model, kv_offload_dir=str(folder), **options)
    for prompt, plain in ((first, expected), (longer, expected_longer)):
        restarted = run(fresh, prompt)
        assert restarted[0].num_cached >= 128
        same(restarted, plain)
    assert fresh.stats()["num_files_read"] >= 8
    fresh.close()


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in KINDS])
def test_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, options = KINDS[name]
    check_bits(make(), tmp_path / "kv", options)


def swap_slots(self: HostBlocks, move: Carry) -> None:
    """Fetch two blocks into each other's places."""
    slots = [*move.slots[1::-1], *move.slots[2:]] if not move.is_spilled else move.slots
    carry_blocks(self, move._replace(slots=slots))


carry_blocks = HostBlocks._carry_blocks


def test_a_swapped_block_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = tiny(Qwen3)
    monkeypatch.setattr(HostBlocks, "_carry_blocks", swap_slots)
    with pytest.raises(AssertionError, match="logits of output"):
        check_bits(model, tmp_path, {})


# ---- random schedules

EVENTS = ("num_preemptions", "num_blocks_spilled", "num_blocks_fetched")


def schedules(seeds: range, folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Random schedules of a model and a small cache; what they went through."""
    model, seen = MODELS["mock"](), Counter[str]()
    chosen = list(requests(random.Random(5), 200, [{"temperature": 0}, {"temperature": 1.2, "seed": 3}] * 4, fewest=4))
    plain = [alone(model, None, *request) for request in chosen]
    for seed in seeds:
        rng = random.Random(seed)
        monkeypatch.setattr(offload, "_STEP_BYTES", rng.choice((1, 600, 1 << 20)))
        settings = random_settings(rng, seqs=rng.choice((1, 3)), block_size=rng.choice((1, 2, 4)))
        options: dict[str, Any] = {"kv_offload_memory": rng.choice((1500, 20000)), "use_prefix_cache": True}
        options["kv_offload_dir"] = None if folder is None else str(folder / str(seed % 3))
        speculate = rng.choice([None, Oracle([seq.token_ids for seq, _ in plain], k=3, wrong=5)])
        llm = LLM(model=model, settings=settings, speculate=speculate, draft_length="fixed", **options)
        recorded = record(llm)
        for index, seq in run_at_random(rng, llm, chosen):
            compare(*plain[index], seq, recorded.get(seq.id, {}))
        assert llm.pool.num_used == 0
        seen += Counter(llm.stats())
        llm.close()
    return seen


def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = schedules(range(60), None, monkeypatch)
    assert all(seen[event] > 5 for event in EVENTS), seen


def test_schedules_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.engine.build.identity", lambda *_: b"one model")  # a mock has no weights to digest
    seen = schedules(range(20), tmp_path, monkeypatch)
    assert all(seen[event] > 2 for event in (*EVENTS, "num_files_read")), seen


# ---- faults


@pytest.fixture
def warm(tmp_path: Path) -> tuple[Any, Path, Run]:
    """A model, a folder in which an engine has left the blocks of a prompt, and the prompt's run."""
    torch.manual_seed(0)
    model = tiny(Qwen3)
    llm = engine(model, kv_offload_dir=str(tmp_path / "kv"))
    plain = run(llm, tokens(0))
    llm.close()
    return model, tmp_path / "kv", plain


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_broken_and_foreign_files(warm: tuple[Any, Path, Run], caplog: pytest.LogCaptureFixture) -> None:
    model, folder, plain = warm
    cut, changed, renamed, source = files(folder)[:4]
    cut.write_bytes(cut.read_bytes()[:-1])
    changed.write_bytes(changed.read_bytes()[:-9] + b"\x01" + changed.read_bytes()[-8:])
    renamed.write_bytes(source.read_bytes())
    (folder / "notes.txt").write_text("mine")
    (folder / "00").mkdir()
    names = set(files(folder))
    with caplog.at_level(logging.WARNING):
        llm = engine(model, kv_offload_dir=str(folder))
        same(run(llm, tokens(0)), plain)
    assert llm.stats()["num_files_failed"] == 3
    assert "notes.txt; they are ignored" in caplog.text
    assert caplog.text.count("computed again instead. This is said once") == 1
    llm.close()
    assert (folder / "notes.txt").read_text() == "mine"
    assert set(files(folder)) == names, "what was broken has been written again"
    again = engine(model, kv_offload_dir=str(folder))
    same(run(again, tokens(0)), plain)
    assert again.stats()["num_files_failed"] == 0
    assert again.stats()["num_files_read"] == 9
    again.close()


def test_others_cannot_read_a_new_folder(warm: tuple[Any, Path, Run]) -> None:
    _, folder, _ = warm
    assert folder.stat().st_mode & 0o077 == 0


def test_files_that_vanish_while_they_are_listed(tmp_path: Path) -> None:
    """Another engine makes room in the same folder; a link that leads nowhere looks the same."""
    name = f"{'0' * 32}/{'1' * 32}.0"
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).symlink_to(tmp_path / "gone")
    llm = engine(tiny(Qwen3), kv_offload_dir=str(tmp_path))
    assert llm.stats()["num_disk_bytes"] == 0
    llm.close()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = tiny(Qwen3)
    plain = alone(model, None, tokens(0), PARAMS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "_write", full)
    llm = engine(model, kv_offload_dir=str(tmp_path))
    for prompt in (0, 1, 0, 2, 0):
        actual = run(llm, tokens(prompt))
    same(actual, plain)
    assert actual[0].num_cached, "host memory goes on"
    assert caplog.text.count("No space left on device") == 1
    assert not files(tmp_path)
    llm.close()


@pytest.mark.parametrize("name", ["run", "move"])
def test_moves_that_were_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error before the device has copied anything, no block is taken for one that was copied."""
    torch.manual_seed(0)
    model = tiny(Qwen3)
    expected = alone(model, None, tokens(0), PARAMS)
    llm = engine(model, kv_offload_memory=1 << 24)
    if name == "run":
        run(llm, tokens(0))
        run(llm, tokens(1))

    def fail(*_: object) -> None:
        raise MemoryError("no memory for this")

    def finish() -> None:
        while llm.has_work:
            llm.step()

    (seq,) = llm.add(tokens(0), PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, name, fail)
        with pytest.raises(MemoryError):
            finish()
    finish()
    assert seq.output_ids == expected[0].output_ids
    run(llm, tokens(1))
    same(run(llm, tokens(0)), expected)
    llm.close()


def test_no_more_host_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = tiny(Qwen3)
    plain = alone(model, None, tokens(0), PARAMS)
    monkeypatch.setattr(offload, "_CHECKED", 1)
    free = [1 << 40] * 5
    monkeypatch.setattr(offload, "free_memory", lambda: free.pop() if free else 1 << 20)
    llm = engine(model, kv_offload_memory=1 << 24)
    for prompt in (0, 1, 0, 2, 0):
        same(actual := run(llm, tokens(prompt)), plain if not prompt else actual)
    assert llm.stats()["num_host_slots"] == 5
    assert caplog.text.count("host memory ran out") == 1
    llm.close()


def test_a_failed_write_in_the_way_of_a_read() -> None:
    """What is to be read needs memory, and takes it from a block whose file turns out not to be there."""

    class OneRank:
        def results(self, tickets: list[int], **_: Any) -> dict[int, bool]:
            return dict.fromkeys(tickets, False)

    moves: list[Any] = []
    sizes = Sizes(slots=2, slot=128, snapshot=0, disk=1 << 20)
    beyond = Offload(OneRank(), moves, sizes, identify=lambda: b"one", folder=None, checks_memory=False)
    first, second, other = (f"{i:032x}" for i in range(3))
    beyond._files[beyond._path(first)] = 128
    beyond.spill([(0, second)])
    beyond.begin(is_decoding=False)
    beyond.spill([(1, other)])
    beyond.begin(is_decoding=False)
    beyond.take()
    tickets = beyond.read_ahead([first, second], 0, has_state=lambda _: True)
    assert [move.name for move in beyond.take() if move.action == "read"] == [beyond._path(first)]
    assert len(tickets) == 1


def test_files_are_bounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, most = tiny(Qwen3), 100_000
    for seed in range(4):
        llm = engine(model, kv_offload_dir=str(tmp_path), kv_offload_disk=most)
        run(llm, tokens(seed))
        run(llm, tokens(seed + 1))
        llm.close()
        assert 0 < sum(path.stat().st_size for path in files(tmp_path)) <= most
    llm = engine(model, kv_offload_dir=str(tmp_path), kv_offload_disk=most)
    assert run(llm, tokens(4))[0].num_cached, "the newest are kept"
    llm.close()


def test_new_weights_before_old_files_are_removed(warm: tuple[Any, Path, Run]) -> None:
    """The start finds more files than there is room for; `forget` comes before they are removed."""
    model, folder, _ = warm
    assert sum(path.stat().st_size for path in files(folder)) > 50_000
    llm = engine(model, kv_offload_dir=str(folder), kv_offload_disk=50_000)
    llm.forget()
    run(llm, tokens(1, 20))
    llm.close()
    assert sum(path.stat().st_size for path in files(folder)) <= 50_000


def test_forget_keeps_files_that_were_to_be_read(warm: tuple[Any, Path, Run]) -> None:
    model, folder, _ = warm
    llm = engine(model, kv_offload_dir=str(folder))
    before = llm.stats()["num_disk_bytes"]
    llm.add(tokens(0), PARAMS)
    llm.forget()
    assert llm.stats()["num_disk_bytes"] == before
    llm.close()


def test_new_weights(warm: tuple[Any, Path, Run]) -> None:
    """Nothing of the old weights is served, and their files are found when they come back."""
    model, folder, plain = warm
    old = {name: destination.tensor().clone() for name, destination in nn.destinations(model).items()}
    llm = engine(model, kv_offload_dir=str(folder))
    assert run(llm, tokens(0))[0].num_cached
    llm.update_weights((name, x + 0.01 * torch.randn_like(x)) for name, x in old.items())
    changed = run(llm, tokens(0))
    assert not changed[0].num_cached
    same(changed, alone(model, None, tokens(0), PARAMS))
    llm.update_weights(old.items())
    again = run(llm, tokens(0))
    assert again[0].num_cached
    same(again, plain)
    llm.close()


def test_files_of_more_ranks_are_removed(warm: tuple[Any, Path, Run]) -> None:
    """An engine of one rank removes what one of three has left."""
    model, folder, _ = warm
    for path in files(folder):
        for rank in (1, 2):
            path.with_suffix(f".{rank}").write_bytes(path.read_bytes())
    llm = engine(model, kv_offload_dir=str(folder), kv_offload_disk=1)
    run(llm, tokens(1))
    llm.close()
    assert not files(folder)


def test_names_tell_prefixes_apart(warm: tuple[Any, Path, Run]) -> None:
    model, folder, _ = warm
    llm = engine(model, kv_offload_dir=str(folder))
    beyond = llm.pool.beyond
    assert beyond is not None

    def names(seed: int = 0, salt: str | None = None, adapter: str | None = None, digest: bytes = b"") -> list[str]:
        contents = [Content(range(20, 40), digest * 16)] if digest else []
        seq = Sequence(tokens(seed), SamplingParams(cache_salt=salt), max_len=180, contents=contents)
        seq.adapter = adapter
        return llm.pool.digests(beyond, seq, 9)

    base, picture = names(), names(digest=b"a")
    assert base == names()
    for other in (names(1), names(salt="b"), names(adapter="b"), names(salt="None")):
        assert not set(base) & set(other)
    assert picture[0] == base[0], "the picture comes later"
    assert not set(picture[1:]) & {*base, *names(digest=b"b")}
    assert run(llm, tokens(0), SamplingParams(temperature=0, max_tokens=1, cache_salt="b"))[0].num_cached == 0
    llm.close()


def test_other_engines_do_not_share(warm: tuple[Any, Path, Run]) -> None:
    model, folder, _ = warm
    for options in ({"block_size": 8, "num_blocks": 24}, {"kv_cache_dtype": "int8"}):
        llm = engine(model, kv_offload_dir=str(folder), **options)
        assert run(llm, tokens(0))[0].num_cached == 0
        llm.close()


def test_copies_of_a_prefix_take_one_place() -> None:
    """Two requests that compute one prompt at the same time end in the same step."""
    torch.manual_seed(0)
    llm = engine(tiny(Qwen3), num_blocks=24, max_prompt_tokens=2048, kv_offload_memory=1 << 24)
    for _ in range(2):
        llm.add(tokens(0), PARAMS)
    while llm.has_work:
        llm.step()
    assert llm.stats()["num_host_slots_used"] == 9
    llm.close()


def test_models_with_equal_weights_and_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights nor caches show how K is cut, how long rotations reach, and whether there are CPU kernels."""
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = Qwen3.tiny(hidden_size=128, intermediate_size=256) | {"rope_parameters": rotation}
    config = {k: v for k, v in config.items() if k != "rope_theta"} | {"max_position_embeddings": 256}
    plain: Any = random_model(config, device="cpu", dtype=torch.float32)

    def identity_of(**options: Any) -> bytes:
        model = build(config, device="cpu", dtype=torch.float32, **options)
        model.load_state_dict(plain.state_dict())
        llm = engine(model, kv_offload_dir=str(tmp_path))
        llm.close()
        assert llm.pool.beyond is not None
        return llm.pool.beyond.identity

    base = identity_of()
    assert identity_of() == base
    assert identity_of(max_length=512) != base
    assert identity_of(tp=nn.Ranks(segments=4)) != base
    monkeypatch.setattr("whorl.engine.build.kernels_digest", lambda: "others")
    assert identity_of() != base


def test_check_sums_see_every_change() -> None:
    x = torch.randn(5000)
    for i, j in ((0, 1), (3, 4000), (4095, 4096), (4998, 4999)):
        swapped = x.clone()
        swapped[[i, j]] = x[[j, i]]
        assert check_sums(swapped) != check_sums(x)
    assert check_sums(x.view(2, 2500)) != check_sums(x)
    assert check_sums(x.clone()) == check_sums(x)
    assert check_sums(torch.cat([torch.zeros(1), x])[1:]) == check_sums(x), "a part need not begin at a word"


def test_it_needs_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="needs the prefix cache"):
        engine(MODELS["mock"](), kv_offload_memory=1 << 20, use_prefix_cache=False)


# ---- ranks


def test_a_read_waits_for_what_its_memory_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives memory to a read when its own write is done; that of another rank may not be."""
    one, two = torch.ones(128, dtype=torch.uint8), torch.full((128,), 2, dtype=torch.uint8)
    writer = BlockFiles(tmp_path, 1, "cpu")
    writer.do(FileMove("write", "00/two", [1], 128, 0), [two.numpy()])
    writer.finish_slots([1])
    may_write, write = threading.Event(), BlockFiles._write

    def late(*arguments: Any) -> None:
        assert may_write.wait(10)
        write(*arguments)

    monkeypatch.setattr(BlockFiles, "_write", late)
    writer.do(FileMove("write", "00/one", [0], 128, 1), [one.numpy()])
    writer.do(FileMove("read", "00/two", [0], 128, 2), [one.numpy()])
    threading.Timer(0.2, may_write.set).start()
    assert writer.result(2, wait=True)
    assert torch.equal(one, two)
    writer.close()
    assert not writer.result(1), "nobody asks rank 1 for results of writes, so it keeps none"
    reader = BlockFiles(tmp_path, 1, "cpu")
    reader.do(FileMove("read", "00/one", [0], 128, 0), [two.numpy()])
    assert reader.result(0, wait=True)
    assert torch.equal(two, torch.ones_like(two))
    reader.close()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Every rank carries its shard; a file that one rank lacks is read on none."""
    paths = write_checkpoints(tmp_path, {"qwen3": Qwen3.tiny(hidden_size=96, intermediate_size=160)})
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "max_model_len": LONGEST, "max_num_seqs": 2}
    folder, (first, other) = tmp_path / "kv", (tokens(0, 30), tokens(1, 30))

    def make(**options: Any) -> LLM:
        options["tokenizer"] = ByteTokenizer()
        return LLM(paths["qwen3"], device="cpu", dtype="float32", tp=2, **sizes, **options)

    plain = make(use_prefix_cache=False)
    expected = run(plain, first)
    plain.close()
    llm = make(kv_offload_dir=str(folder))
    for prompt in (first, other):
        run(llm, prompt)
    same(fetched := run(llm, first), expected)
    assert fetched[0].num_cached == 28
    llm.close()
    assert {path.suffix for path in files(folder)} == {".0", ".1"}
    for lost in files(folder):
        if lost.suffix == ".1":
            lost.unlink()
    for num_failed in (7, 0):
        llm = make(kv_offload_dir=str(folder))
        same(run(llm, first), expected)
        assert llm.stats()["num_files_failed"] == num_failed
        llm.close()


@pytest.mark.slow
def test_ranks_with_shards_of_different_sizes(tmp_path: Path) -> None:
    """Rank 0 has one key head and rank 1 has two: a file has all bytes of its rank's block."""
    config = Qwen3.tiny(hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=3)
    paths = write_checkpoints(tmp_path, {"qwen3": config})
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "max_model_len": LONGEST, "max_num_seqs": 2}
    runs = []
    for _ in range(2):
        folder: dict[str, Any] = {"kv_offload_dir": str(tmp_path / "kv"), "tokenizer": ByteTokenizer()}
        llm = LLM(paths["qwen3"], device="cpu", dtype="float32", tp=2, **folder, **sizes)
        runs.append(run(llm, tokens(0, 30)))
        llm.close()
    assert runs[1][0].num_cached == 28
    same(runs[1], runs[0])
