"""`EngineSettings`: what it refuses, how `LLM` takes it, and that a field of it is an option of four commands."""

import contextlib
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mock_model import MockModel

from whorl.bench.options import SET_BY_MEASUREMENT
from whorl.cluster.options import ClusterOptions
from whorl.engine import memory, tensor_parallel, weights
from whorl.engine.llm import LLM
from whorl.engine.load import load
from whorl.engine.settings import EngineSettings, LoadOptions
from whorl.fields import aliases, flag_names, options
from whorl.pasted import LLAMA_CPP, MISSING, NEEDLESS
from whorl.serve.openai import settings_for
from whorl.serve.options import ServeOptions
from whorl.serve.settings import ServerSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"

# ---- the object


def test_every_field_is_documented_and_frozen() -> None:
    assert [each.name for each, _ in options(EngineSettings)] == [each.name for each in fields(EngineSettings)]
    assert all(made.text.endswith(".") for _, made in options(EngineSettings))
    with pytest.raises(FrozenInstanceError):
        EngineSettings().tp = 2  # type: ignore[misc]


def test_dtypes_by_any_name() -> None:
    for dtype in ("float16", "half", torch.float16):
        assert EngineSettings().changed(dtype=dtype).dtype == "float16"
    assert EngineSettings(dtype="auto") == EngineSettings()


WRONG = {
    "dtype is 'int3', expected None, 'bfloat16'": {"dtype": "int3"},
    "device is 'abacus', expected None, 'cpu', 'cuda' or 'npu'": {"device": "abacus"},
    "max_num_seqs is 0, expected at least 1": {"max_num_seqs": 0},
    "max_num_seqs is None, expected a whole number": {"max_num_seqs": None},
    "max_model_len is 1, expected at least 2": {"max_model_len": 1},
    "prompt_graphs is 2049, expected at most 2048": {"prompt_graphs": 2049},
    "tp is 1.5, expected a whole number": {"tp": 1.5},
    "block_size is True, expected a whole number": {"block_size": True},
    "gpu_memory_utilization is 0, expected more than 0": {"gpu_memory_utilization": 0},
    "gpu_memory_utilization is 1.5, expected at most 1": {"gpu_memory_utilization": 1.5},
}


@pytest.mark.parametrize(("message", "options"), WRONG.items())
def test_what_cannot_be(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(**options)


def test_a_step_has_room_for_what_was_asked() -> None:
    assert EngineSettings().step_tokens == 2048
    assert EngineSettings(max_num_seqs=3000).step_tokens == 3000
    assert EngineSettings(max_prompt_tokens=4000).step_tokens == 4000
    assert EngineSettings(max_num_seqs=8, max_num_batched_tokens=32).step_tokens == 32


# ---- the engine


def test_an_engine_takes_settings_and_changes() -> None:
    model: Any = MockModel()
    settings = EngineSettings(device="cpu", num_blocks=8, block_size=4, max_num_seqs=3, run_ahead=True)
    llm = LLM(model=model, settings=settings, max_num_seqs=2, use_prefix_cache=False)
    assert llm.settings == settings.changed(max_num_seqs=2, use_prefix_cache=False)
    assert (llm.pool.num_blocks, llm.pool.block_size, llm.pool.use_prefix_cache) == (8, 4, False)
    assert (llm.scheduler.max_num_seqs, llm.run_ahead) == (2, True)
    assert LLM(None, settings, model=model).settings is not None


def test_an_unknown_name_says_which_is_nearest() -> None:
    model: Any = MockModel()
    with pytest.raises(
        TypeError, match=r"no such setting: 'max_num_seq'\. The nearest is 'max_num_seqs'; all are device"
    ):
        LLM(model=model, device="cpu", max_num_seq=2)


def test_a_share_of_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM counts: what the whole device may have in use, less what already is."""
    card = SimpleNamespace(mem_get_info=lambda: (60, 100))
    monkeypatch.setattr(memory, "accelerator", lambda device: card)
    monkeypatch.setattr(memory, "cache_memory", lambda device: 54)
    assert memory.memory_left(0.5, "cuda") == 10
    assert memory.memory_left(1.0, "cuda") == 54, "activations keep their room"
    with pytest.raises(ValueError, match="raise it, or shard the model"):
        memory.memory_left(0.4, "cuda")
    monkeypatch.setattr(memory, "accelerator", lambda device: None)
    model: Any = MockModel()
    with pytest.raises(ValueError, match="cpu is no accelerator; set the bytes of the cache instead"):
        LLM(model=model, device="cpu", gpu_memory_utilization=0.5)


def test_blocks_go_before_bytes_and_bytes_before_a_share() -> None:
    model: Any = MockModel()
    sizes = {"gpu_memory_utilization": 0.5, "memory": 4000, "block_size": 4}
    by_bytes = LLM(model=model, device="cpu", memory=4000, block_size=4).pool.num_blocks
    assert LLM(model=model, device="cpu", **sizes).pool.num_blocks == by_bytes != 9
    assert LLM(model=model, device="cpu", **sizes, num_blocks=9).pool.num_blocks == 9


def test_the_cache_is_sized_by_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = MockModel()
    whole = LLM(model=model, device="cpu", block_size=4, memory=4000).pool.num_blocks
    monkeypatch.setattr(memory, "accelerator", lambda device: SimpleNamespace(mem_get_info=lambda: (9000, 10000)))
    assert LLM(model=model, device="cpu", block_size=4, gpu_memory_utilization=0.5).pool.num_blocks == whole


# ---- command lines

ONE_MORE_FIELD = """
import json
from dataclasses import dataclass

from typer.testing import CliRunner

import whorl.engine.settings as settings
from whorl.fields import option


@dataclass(frozen=True, kw_only=True)
class More(settings.EngineSettings):
    colour: str = option("grey", "What it is painted with.", vllm=("--paint",), panel=settings.CACHE)


settings.EngineSettings = More
from whorl.cli import app

commands = (["generate"], ["chat"], ["serve"], ["bench", "decode"], ["bench", "serve"])
found = {" ".join(c): CliRunner().invoke(app, [*c, "--help-all"], env={"COLUMNS": "200"}).output for c in commands}

from whorl.chat import command


def load(options):
    raise ValueError(f"asked for {options.engine.colour}")


command.load = load
names = ("--colour", "--paint")
found["given"] = [CliRunner().invoke(app, ["generate", "-p", "x", name, "red"]).output for name in names]
print(json.dumps(found))
"""


def test_a_new_field_is_an_option_of_every_command() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_MORE_FIELD], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers.pop("given") == ["whorl: asked for red\n"] * 2
    assert list(answers) == ["generate", "chat", "serve", "bench decode", "bench serve"]
    for text in answers.values():
        assert "--colour" in text
        assert "What it is painted with." in text
        assert "[default: grey]" in text


def test_what_a_measurement_sets_is_a_field() -> None:
    assert set(SET_BY_MEASUREMENT) < {each.name for each in fields(EngineSettings)}


# ---- the page


def rows(kind: type) -> list[str]:
    lines = []
    for each, made in options(kind):
        ours = [name for spelled in flag_names(each) for name in spelled.split("/")]
        vllm = [name for spelled in made.vllm for name in spelled.split("/")]
        cells = (_code(ours), f"`{each.name}`", _code(vllm), made.text.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
        assert set(aliases(each)) <= set(vllm)
    return lines


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@pytest.mark.parametrize("kind", [EngineSettings, ServeOptions, ClusterOptions])
def test_the_page_has_every_field(kind: type) -> None:
    text = PAGE.read_text(encoding="utf-8")
    expected = "\n".join(rows(kind))
    assert f"|---|---|---|---|\n{expected}\n\n" in text, f"docs/settings.md: this table is the code's:\n{expected}"


def test_the_page_has_what_is_passed_over_and_what_is_refused() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in (NEEDLESS, MISSING, {name: f"`{own}`" for name, own in LLAMA_CPP.items()}):
        expected = "\n".join(f"| `{name}` | {text} |" for name, text in table.items())
        assert f"|---|---|\n{expected}\n" in text, f"docs/settings.md: this table is the code's:\n{expected}"


# ---- declared once


def test_the_server_has_the_commands_fields() -> None:
    """With the same bounds, by the same names: none of them is written down a second time."""
    own = {"api_keys", "api_key_file", "chat_template", "max_request_pixels", "limit_mm_per_prompt"}
    kinds = ServeOptions, ServerSettings
    of_command, of_server = ({field.name: option for field, option in options(kind)} for kind in kinds)
    for name in set(of_command) - own - {"names"}:  # a server has a name
        assert of_server[name] is of_command[name]
    changed = {"port": 1, "timeout": 2.5, "drain_seconds": 3.0, "origins": ("http://a.example",), "media_folder": "/m"}
    passed = ServeOptions(**changed).settings()  # type: ignore[arg-type]
    assert {name: getattr(settings_for("model", **passed), name) for name in changed} == changed
    assert set(of_command) - own <= set(passed)


@pytest.mark.parametrize("kind", [ServeOptions, ServerSettings])
def test_bounds_of_a_server_are_those_of_its_table(kind: type) -> None:
    for field, option in options(kind):
        bounds = {option.least: -1, option.most: 1, option.above: 0}
        for bound, beyond in bounds.items():
            if bound is not None:
                with pytest.raises(ValueError, match=f"serve: {field.name} is .*, expected "):
                    kind(**{field.name: type(field.default or 0)(bound + beyond)})


def test_a_load_option_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of the table is a setting and an option of every command, and gets to `load_model` on every rank."""
    values = {"device": "cpu", "dtype": "float16", "quantize": "w8a8", "unpack": True}
    values |= {"backend": "native", "max_model_len": 77}
    settings = EngineSettings(**values, tp=2)  # type: ignore[arg-type]
    assert [field.name for field, _ in options(EngineSettings)][: len(values)] == list(values)
    seen: list[dict[str, Any]] = []

    def load_model(path: Path, options: LoadOptions, **more: Any) -> Any:
        seen.append({name: getattr(options, name) for name in values})
        raise InterruptedError

    class Group:
        def close(self, **_: Any) -> None: ...

    def start(place: Any, device: str, function: str, sent: dict[str, Any]) -> Any:
        rank = SimpleNamespace(rank=1, size=2, device="cpu", get=lambda _: json.loads(json.dumps(sent)))
        with pytest.raises(InterruptedError):
            tensor_parallel.follow(rank)  # type: ignore[arg-type]
        return Group()

    monkeypatch.setattr(weights, "load_model", load_model)
    monkeypatch.setattr(weights, "resolve", Path)
    monkeypatch.setattr(weights, "open_checkpoint", lambda path, **_: contextlib.nullcontext())
    monkeypatch.setattr(weights, "rounded", lambda checkpoint, quantize: SimpleNamespace(config={}))
    monkeypatch.setattr(weights, "build", lambda config, **options: SimpleNamespace(cache_specs=list, modules=tuple))
    monkeypatch.setattr(tensor_parallel, "start", start)
    for one in (settings, settings.changed(tp=1)):
        with pytest.raises(InterruptedError):
            load("folder", object(), "cpu", one)  # type: ignore[arg-type]
    assert seen == [values] * 3, "on rank 1, on rank 0, alone"
