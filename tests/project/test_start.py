"""What a start costs: modules that a CPU does not need stay out, and trials are not made twice."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from serving import byte_tokenizer

from whorl import device
from whorl.device import arithmetic_of, cache_folder
from whorl.models.qwen3 import Qwen3
from whorl.ops import _trial_store
from whorl.ops._trial_store import TrialStore

# Each of these took from a tenth of a second to several, or is of another command.
NOT_NEEDED = {
    *("sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "triton", "torch_npu"),
    *("transformers", "fastapi", "uvicorn", "starlette", "prometheus_client", "llguidance", "matplotlib", "pandas"),
    *("scipy", "torchtitan", "whorl.passes", "whorl.titan", "whorl.doctor.command", "whorl.serve.openai"),
    *("whorl.bench.decode", "whorl.bench.ops", "whorl.plan.search", "whorl.engine.speculate.draft_model"),
}
GENERATE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from whorl.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    config = Qwen3.tiny(vocab_size=len(tokenizer)) | {"eos_token_id": tokenizer.eos_ids[0]}
    (path,) = write_checkpoints(tmp_path_factory.mktemp("start"), {"tiny": config}).values()
    tokenizer._backend.save(str(path / "tokenizer.json"))
    return path


def test_what_generate_does_not_import_on_a_cpu(folder: Path) -> None:
    arguments = ["generate", str(folder), "--device", "cpu", "--prompt", "abc", "-n", "3", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-c", GENERATE, *arguments]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] >= 1
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "whorl.engine.llm" in loaded, "the list is of the process that generated"
    assert not NOT_NEEDED & loaded


# ---- trials


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where outcomes are kept while a test runs."""
    monkeypatch.setenv(device.CACHE_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials"


def counted(outcome: bool) -> tuple[Callable[[], bool], list[None]]:
    calls: list[None] = []

    def trial() -> bool:
        calls.append(None)
        return outcome

    return trial, calls


def file_of(kept: Path) -> Path:
    (path,) = kept.iterdir()
    return path


def test_a_trial_is_made_once(kept: Path) -> None:
    trial, calls = counted(False)
    for _ in range(2):
        store = TrialStore("kind", __file__)  # as another start has it
        assert [store.outcome("2x3", "cpu", trial) for _ in range(2)] == [False, False]
    assert len(calls) == 1
    assert store.outcome("2x4", "cpu", counted(True)[0])
    assert json.loads(file_of(kept).read_text())["outcomes"] == {"2x3": False, "2x4": True}
    assert [path.suffix for path in kept.iterdir()] == [".json"], "nothing half written is left"


def test_other_machines_code_and_kinds_have_files_of_their_own(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, calls = counted(True)
    TrialStore("kind", __file__).outcome("2x3", "cpu", trial)
    monkeypatch.setattr(torch, "__version__", "99.0")
    TrialStore("kind", __file__).outcome("2x3", "cpu", trial)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    TrialStore("kind", __file__).outcome("2x3", "cpu", trial)
    monkeypatch.setattr(device, "_cpu_name", lambda: "another")
    TrialStore("kind", __file__).outcome("2x3", "cpu", trial)
    TrialStore("kind", __file__, _trial_store.__file__).outcome("2x3", "cpu", trial)
    TrialStore("other", __file__).outcome("2x3", "cpu", trial)
    assert len(calls) == len(list(kept.iterdir())) == 6


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:40], "cannot be read"),
        (lambda text: "[" * 100_000, "cannot be read"),
        (lambda text: "\udcff\udc80", "cannot be read"),
        (lambda text: "[]", "another program"),
        (lambda text: text.replace('"torch"', '"tarch"'), "another machine"),
        (lambda text: text.replace("true", "1"), "not true or false"),
    ],
    ids=["cut", "deep", "bytes", "other", "machine", "numbers"],
)
def test_a_file_that_is_wrong_is_ignored(
    kept: Path, damage: Callable[[str], str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    TrialStore("kind", __file__).outcome("2x3", "cpu", counted(True)[0])
    path = file_of(kept)
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    trial, calls = counted(False)
    with caplog.at_level(logging.WARNING):
        assert not TrialStore("kind", __file__).outcome("2x3", "cpu", trial)
    assert len(calls) == 1
    assert why in caplog.text
    caplog.clear()
    assert not TrialStore("kind", __file__).outcome("2x3", "cpu", counted(True)[0]), "it was written anew"
    assert not caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(device.CACHE_FOLDER, str(tmp_path / "file"))
    store = TrialStore("kind", __file__)
    with caplog.at_level(logging.WARNING):
        assert [store.outcome(key, "cpu", counted(True)[0]) for key in "abc"] == [True] * 3
    assert caplog.text.count("not written") == 1, "said once"


def test_two_processes_at_once_lose_nothing_that_is_wrong(kept: Path) -> None:
    """Each writes whole files: a reader never sees half of one, and what two agree on stays."""

    def work(number: int) -> None:
        store = TrialStore("kind", __file__)
        for key in range(20):
            store.outcome(f"{number} {key}", "cpu", lambda key=key: key % 2 == 0)  # type: ignore[misc]
            json.loads(file_of_kind(kept).read_text())

    def file_of_kind(kept: Path) -> Path:
        return next(path for path in kept.iterdir() if path.suffix == ".json")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = json.loads(file_of(kept).read_text())["outcomes"]
    assert outcomes
    assert all(value == (int(key.split()[1]) % 2 == 0) for key, value in outcomes.items())


def test_where_outcomes_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() is None, "the tests keep nothing"
    trial, calls = counted(True)
    store = TrialStore("kind", __file__)
    assert [store.outcome("2x3", "cpu", trial) for _ in range(2)] == [True, True]
    assert len(calls) == 2
    monkeypatch.delenv(device.CACHE_FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "whorl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "whorl"


def test_a_machine_that_cannot_be_named_keeps_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cpu_name", lambda: "")
    assert arithmetic_of("cpu") is None
    assert TrialStore("kind", __file__).outcome("2x3", "cpu", counted(True)[0])
    assert not kept.exists()


def test_products_of_the_cpu_are_not_tried_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    tiles = importlib.import_module("whorl.ops.linear")
    monkeypatch.setattr(tiles, "_STORE", TrialStore("linear", tiles.__file__))
    arguments = torch.Size((16, 64)), torch.float32, "cpu", 1
    first = tiles._sizes.__wrapped__(*arguments)
    monkeypatch.setattr(tiles, "_STORE", TrialStore("linear", tiles.__file__))
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("it was tried again"))
    assert tiles._sizes.__wrapped__(*arguments) == first
