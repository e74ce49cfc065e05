"""A random Qwen3.5 with vision, in the files of a published model, through the programs: serve, generate, quantize."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from serving import Served, prepared
from toy import PRETRAINED, image, picture, text
from typer.testing import CliRunner

from whorl import nn
from whorl.cli import app
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model, random_prediction
from whorl.models.qwen3_5 import Qwen3_5

ENGINE = EngineSettings(device="cpu", max_num_seqs=4, block_size=16, num_blocks=128, num_snapshots=4)
QUESTION = "which squares are there? " * 8  # past a chunk of 64 tokens
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer and the processors of the toy that sees, with another model."""
    path = tmp_path_factory.mktemp("programs") / "model"
    shutil.copytree(PRETRAINED, path)
    theirs = json.loads((path / "config.json").read_text())
    sizes = {name: theirs["vision_config"][name] for name in ("patch_size", "num_position_embeddings")}
    vocab, length = theirs["text_config"]["vocab_size"], theirs["text_config"]["max_position_embeddings"]
    config = Qwen3_5.tiny(
        sizes, vocab_size=vocab, max_position_embeddings=length, hidden_size=64, mtp_num_hidden_layers=1
    )
    config |= {name: theirs[name] for name in MARKS}
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": theirs["text_config"]["eos_token_id"]}))
    model: Any = random_model(config, device="cpu", dtype=torch.float32)
    parts = (model, random_prediction(model))
    tensors = {name: slot.tensor() for part in parts for name, slot in nn.destinations(part).items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with prepared(folder, ENGINE) as running:
        yield running


def test_openai_s_client_sends_pictures_and_streams(served: Served) -> None:
    """An equal request begins at a snapshot behind the picture, and has the same answer; another picture has not."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    answers = []
    for colour in ("red", "red", "blue"):
        content = [image(picture("two", colour, 3)), text(QUESTION)]
        stream = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(stream)
        answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        assert chunks[-1].usage.completion_tokens == 12
    assert answers[0] == answers[1]
    assert served.llm.stats()["num_states_loaded"] >= 1
    assert served.llm.stats()["num_tokens_hit"] >= 64


def test_memory_of_states_is_shown(served: Served) -> None:
    import httpx

    metrics = httpx.get(f"{served.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if "whorl:state_" in line and line[0] != "#")
    of_model = {name.partition("{")[0]: float(value) for name, value in values.items()}
    states = served.llm.runner.states
    assert states is not None
    assert of_model["whorl:state_memory_bytes"] == states.num_bytes > 0
    assert of_model["whorl:state_snapshots_saved_total"] >= 1
    assert httpx.get(f"{served.url}/page/stats").json()["engine"]["num_state_bytes"] == states.num_bytes


@pytest.mark.slow
def test_the_terminal_with_drafts_and_without(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(picture("three", "yellow", 5))
    arguments = ["generate", str(folder), "--chat", "-p", QUESTION, "--image", str(file), "--device", "cpu"]
    arguments += ["--temperature", "0", "--max-tokens", "20"]
    plain = CliRunner().invoke(app, arguments)
    assert plain.exit_code == 0, plain.output
    drafted = CliRunner().invoke(app, [*arguments, "--speculate", "mtp"])
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_a_quantised_copy(folder: Path, tmp_path: Path, scheme: str) -> None:
    """Its gates, tower and convolutions are as they were; drafts load, too."""
    out = tmp_path / "copy"
    done = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--format", scheme])
    assert done.exit_code == 0, done.output
    arguments = ["generate", str(out), "-p", "abc", "--device", "cpu", "--max-tokens", "4", "--speculate", "mtp"]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.output


@pytest.mark.slow
def test_the_doctor_takes_it(folder: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code in (0, 1), done.output
