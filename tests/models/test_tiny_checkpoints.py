"""examples/tiny_checkpoint.py: a checkpoint of every architecture, which the engine loads from its folder and runs."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.tokenizer import Tokenizer
from whorl.engine.weights import load_model
from whorl.models import ARCHITECTURES

SCRIPT = Path(__file__).parents[2] / "examples" / "tiny_checkpoint.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path) -> list[int]:
    model = load_model(folder, device="cpu", progress=False)
    llm = LLM(model=model, device="cpu", max_num_seqs=2, num_blocks=40, max_num_batched_tokens=80)
    prompt = Tokenizer.from_path(folder).encode("What is this?")
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), progress=False)
    return list(output.token_ids)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, script: ModuleType, tmp_path: Path) -> None:
    config = script.config_of(architecture)
    assert config["architectures"] == [architecture]
    script.write(tmp_path / "tiny", config)
    assert len(run(tmp_path / "tiny")) == 4


def test_gpt_oss_as_it_is_published(script: ModuleType, tmp_path: Path) -> None:
    script.write(tmp_path / "tiny", script.config_of("GptOssForCausalLM", has_mxfp4=True))
    assert len(run(tmp_path / "tiny")) == 4
    model = load_model(tmp_path / "tiny", device="cpu", unpack=False, progress=False)
    assert hasattr(model.decoder.layers[0].mlp.experts.gate_up_proj, "codes")
