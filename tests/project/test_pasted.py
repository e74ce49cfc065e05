"""Command lines written for vLLM, and for the Ascend program whose options ours are: what they come to here."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from default_model import Scripted
from serving import told
from typer.testing import CliRunner

import whorl.engine.llm
from whorl.cli import app
from whorl.engine import model_names
from whorl.engine.sequence_parallel import for_ranks
from whorl.engine.settings import EngineSettings
from whorl.serve import openai


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))  # a shell joins lines that end in a backslash


def run(command: str, **options: Any) -> Result:
    """As typed in a shell."""
    program, *arguments = words(command)
    assert program in ("whorl", "vllm")
    return CliRunner().invoke(app, arguments, **options)


class Made:
    """The engines that a command asked for, instead of making them."""

    def __init__(self) -> None:
        self.path: Any = None
        self.settings = EngineSettings()
        self.served: list[openai.ServerSettings] = []

    def answer(self, path: str | None, settings: EngineSettings, **options: Any) -> Any:
        self.path, self.settings, self.options = path, settings, options
        return Scripted("Paris.", "Yes.")

    def serve(self, path: str | None, settings: EngineSettings, **options: Any) -> Any:
        self.path, self.settings, self.options = path, settings, options
        return told()


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(whorl.engine.llm, "LLM", made.answer)
    monkeypatch.setattr(model_names, "local_or_hub", lambda name: None)  # there are no such models here
    return made


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(whorl.engine.llm, "LLM", made.serve)
    monkeypatch.setattr(model_names, "local_or_hub", lambda name: None)
    monkeypatch.setattr(openai, "check_address", lambda host, port: None)
    monkeypatch.setattr(openai, "_serve", lambda app, settings: made.served.append(settings) or 0)
    return made


# ---- commands that people paste, to the letter

VLLM_ASCEND = {
    """vllm serve Qwen/Qwen3-VL-2B-Instruct \\
    --tensor-parallel-size 2 \\
    --compilation-config '{"pass_config": {"enable_sp": true , "sp_min_token_num": 1000}}'""": 1000,
    """vllm serve Qwen/Qwen3-VL-2B-Instruct \\
    --tensor-parallel-size 2 \\
    --compilation-config '{"pass_config": {"enable_sp": true}}'""": 1000,
    """vllm serve Qwen/Qwen3-VL-2B-Instruct \\
    --tensor-parallel-size 2 \\
    --compilation-config '{"pass_config": {"enable_sp": true, "sp_min_token_num": 512}}'""": 512,
}


@pytest.mark.parametrize(("command", "least"), VLLM_ASCEND.items())
def test_vllm_ascend(served: Made, command: str, least: int) -> None:
    done = run(command)
    assert (done.exit_code, done.stderr) == (0, "")
    assert (served.path, served.settings.tp) == ("Qwen/Qwen3-VL-2B-Instruct", 2)
    assert served.served[0].names == ("Qwen/Qwen3-VL-2B-Instruct", "Qwen3-VL-2B-Instruct")
    told_ranks = for_ranks(served.settings, 2, device="npu")
    assert told_ranks == {"mode": "on", "quantize": None, "min_tokens": least, "fuse": False}


ACLNN = """./scripts/tp_launch.sh 16 ./build/qwen3-moe-aclnn \\
  --model-dir /path/to/Qwen3-235B-A22B-Instruct-2507-BF16 \\
  --prompt "The capital of France is" \\
  --n-predict 100 \\
  --temperature 0 \\
  --vocab tokenizer_data/vocab.bin"""
ACLNN_STABLE = (
    "./scripts/tp_launch.sh 16 ./build/qwen3-moe-aclnn --model-dir ... --temperature 0 --no-stream",
    "./scripts/tp_launch.sh 16 ./build/qwen3-moe-aclnn --model-dir ... --pld --temperature 0 --no-stream",
)
ACLNN_CHAT = """./scripts/tp_launch.sh 16 ./build/qwen3-moe-aclnn --model-dir ... \\
    --interactive --chat --temperature 0.7 --top-p 0.8"""


def launch(command: str, **options: Any) -> Result:
    """The launcher's first word is the number of ranks; its program is `whorl generate`."""
    launcher, size, program, *arguments = words(command)
    assert (launcher, program) == ("./scripts/tp_launch.sh", "./build/qwen3-moe-aclnn")
    return CliRunner().invoke(app, ["generate", *arguments], env={"TP_SIZE": size}, **options)


def test_the_aclnn_program(answered: Made) -> None:
    done = launch(ACLNN)
    assert (done.exit_code, done.stdout) == (0, "Paris.\n")
    assert done.stderr == "whorl: generate: --vocab is ignored: the tokenizer comes with the model\n"
    assert answered.path == "/path/to/Qwen3-235B-A22B-Instruct-2507-BF16"
    assert answered.settings == EngineSettings(tp=16, max_num_seqs=1)
    for command in ACLNN_STABLE:
        assert launch(command, input="The capital of France is").stdout == "Paris.\n"
        assert (answered.options["speculate"] is not None) == ("--pld" in command)
    assert launch(ACLNN_CHAT, input="What is the capital of France?\nReally?\n").stdout == "Paris.\nYes.\n"


# ---- vLLM's spelling

ENGINE = "--tensor-parallel-size 2 --max-model-len 32768 --max-num-seqs 16 --max-num-batched-tokens 8192 "
ENGINE += "--gpu-memory-utilization 0.9 --block-size 128 --dtype half --no-enable-prefix-caching --enforce-eager "
ENGINE += "--no-async-scheduling"
ASKED = EngineSettings(
    tp=2,
    max_model_len=32768,
    max_num_seqs=16,
    max_num_batched_tokens=8192,
    gpu_memory_utilization=0.9,
    block_size=128,
    dtype="half",
    use_prefix_cache=False,
    use_graphs=False,
    run_ahead=False,
)


@pytest.mark.parametrize("command", ["generate -p Hi", "chat"])
@pytest.mark.parametrize("spell", [str, lambda text: text.replace("-size 2", "-size=2").replace("x-num-s", "x_num_s")])
def test_the_engines_options(answered: Made, command: str, spell: Any) -> None:
    done = run(f"whorl {command} {spell(ENGINE)} --seed 3 a/model", input="Hi\n")
    assert (done.exit_code, done.stdout) == (0, "Paris.\n"), done.stderr
    assert (answered.path, answered.settings) == ("a/model", ASKED)


def test_the_servers_options(served: Made, tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_text("a template")
    more = "--served-model-name one two --host 0.0.0.0 --port 0 --api-key k --seed 3 --enable-chunked-prefill"
    more += f" --tool-call-parser hermes --reasoning-parser qwen3 --chat-template {tmp_path}/x.jinja --enable-lora"
    done = run(f"whorl serve a/model {ENGINE} {more} --trust-remote-code")
    assert done.exit_code == 0, done.stderr
    assert (served.path, served.settings) == ("a/model", ASKED.changed(seed=3))
    (settings,) = served.served
    assert (settings.names, settings.keys) == (("one", "two"), ("k",))
    speech = (settings.tool_parser, settings.reasoning_parser, settings.chat_template)
    assert speech == ("hermes", "qwen3", "a template")
    assert done.stderr.splitlines() == [
        "whorl: serve: --enable-chunked-prefill is ignored: prefill is always chunked",
        "whorl: serve: --enable-lora is ignored: adapters are always taken, see --lora",
        "whorl: serve: --trust-remote-code is ignored: code in a checkpoint is never run",
    ]
    run("whorl serve --served-model-name one a/model -tp 4 --model_dir b")
    assert run("vllm serve --model b -tp 4 --served-model-name=one").exit_code == 0
    assert (served.path, served.settings.tp, served.served[-1].names) == ("b", 4, ("one",))


def test_a_model_behind_a_name_stays_the_model(served: Made) -> None:
    run("whorl serve --served-model-name one a/model")
    assert (served.path, served.served[0].names) == ("a/model", ("one",))


# ---- what there is not

LENGTH = "it is an option of whorl generate and chat; clients of a server send max_tokens"


def test_values_are_not_taken_for_options(answered: Made) -> None:
    """A text may look like an option, and so may what stands behind --."""
    for command in (
        "generate --system --quantization --chat -p --enable-lora",
        "generate -p --vocab -- --quantization",
    ):
        done = run(f"whorl {command}")
        assert (done.exit_code, done.stdout, done.stderr) == (0, "Paris.\n", "")
    assert answered.path == "--quantization"
    assert run("whorl generate -pp").stdout == "Paris.\n", "-p p"
    assert "there is no -pp: tensor parallelism is the only way" in run("whorl serve -pp 2").stderr


def test_an_option_that_nobody_has() -> None:
    done = run("whorl serve --max-model-length 3")
    assert done.exit_code == 2
    assert "serve: no such option: --max-model-length; did you mean --max-model-len?" in done.stderr


# ---- llama.cpp's names


def test_llama_cpp(served: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run("whorl serve -m a/model -c 4096 -t 3 -np 2 -ngl 99 --jinja --host 127.0.0.1 --port 0 --alias one")
    assert done.exit_code == 0, done.stderr
    assert (served.path, served.settings) == ("a/model", EngineSettings(max_model_len=4096, max_num_seqs=2))
    assert served.served[0].names == ("one",)
    assert os.environ["OMP_NUM_THREADS"] == "3"  # which torch reads when it is imported
    assert done.stderr.splitlines() == [
        "whorl: serve: -ngl is ignored: the whole model is on the device, see --device",
        "whorl: serve: --jinja is ignored: chat templates are always read as Jinja",
    ]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("chat --host 0.0.0.0", "chat: there is no --host: it is an option of whorl serve"),
        ("serve -n 5", f"serve: there is no -n: {LENGTH}"),
        ("serve --n-predict 5", f"serve: there is no --n-predict: {LENGTH}"),
        ("chat --conversation", "chat: there is no --conversation: use whorl chat"),
        ("generate -p x --treads 3", "generate: no such option: --treads; did you mean --threads?"),
        ("serve --nonsense", "serve: no such option: --nonsense; --help-all lists those that there are"),
        ("generate -p x -t 0.7", "Invalid value for '--threads'"),
        ("generate -c -p x", "Invalid value for '--max-seq'"),
    ],
)
def test_what_is_refused_names_the_right_option(command: str, problem: str) -> None:
    done = run(f"whorl {command}")
    assert done.exit_code == 2
    assert problem in done.stderr


# ---- --help


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_help_shows_what_people_use_first_and_help_all_shows_all(command: str) -> None:
    made: Any = typer.main.get_command(app)
    options = [each.opts[0] for each in made.commands[command].params if each.opts[0].startswith("-")]
    first = made.commands[command].first
    assert 8 <= len(first) <= 10
    assert set(first) <= set(options), "a name that no option has"
    short, full = (run(f"whorl {command} {option}", env={"COLUMNS": "300"}) for option in ("--help", "--help-all"))
    assert (short.exit_code, full.exit_code) == (0, 0)
    for name in options:
        listed = rf"^\W+{name}(?![\w-])"
        assert re.search(listed, full.output, re.MULTILINE), name
        assert bool(re.search(listed, short.output, re.MULTILINE)) == (name in first), name
    assert f"{command} --help-all" in short.output


# ---- vLLM's options of a server


def test_sampling_over_the_models(served: Made) -> None:
    done = run(
        """vllm serve org/m --override-generation-config '{"temperature": 0.25, "top_k": 7}' --disable-log-stats"""
    )
    assert done.exit_code == 0, done.output
    assert "--disable-log-stats is ignored: the log has no statistics" in done.output
    assert served.served[0].sampling() == {"temperature": 0.25, "top_k": 7}
    for text, why in (
        ("7", "expected a JSON object"),
        ('{"max_new_tokens": 9}', "clients say max_tokens"),
        ('{"warmth": 1}', "warmth is not known"),
        ('{"top_p": 3}', "top_p"),
    ):
        done = run(f"whorl serve org/m --override-generation-config '{text}'")
        assert (done.exit_code, why in done.output) == (2, True), done.output


def test_the_level_of_the_log_and_counts_of_pictures(served: Made) -> None:
    done = run("""vllm serve org/m --uvicorn-log-level warning --limit-mm-per-prompt '{"image": 2, "video": 0}'""")
    assert done.exit_code == 0, done.output
    assert served.served[0].log_level == "warning"
    assert served.served[0].media.max_of_kind == {"image": 2, "video": 0}
    done = run("""whorl serve org/m --limit-mm-per-prompt '{"audio": 2}'""")
    assert (done.exit_code, "audio is 2, expected image or video" in done.output) == (2, True)


def test_options_in_a_file(served: Made, tmp_path: Path) -> None:
    """The command line counts more."""
    file = tmp_path / "vllm.yaml"
    lines = (
        "model: org/m",
        "port: 9",
        "uvicorn_log_level: error",
        "enable-prefix-caching: false",
        "served-model-name: [a, b]",
    )
    file.write_text("\n".join((*lines, "max-model-len: 4096", "override-generation-config: {temperature: 0.5}")))
    done = run(f"vllm serve --config {file} --port 10")
    assert done.exit_code == 0, done.output
    (settings,) = served.served
    assert (served.path, settings.port, settings.log_level, settings.names) == ("org/m", 10, "error", ("a", "b"))
    assert settings.sampling() == {"temperature": 0.5}
    assert served.settings.max_model_len == 4096
    assert served.settings.use_prefix_cache  # false leaves a switch alone, as in vLLM
    assert run(f"vllm serve org/other --config={file}").exit_code == 0
    assert served.path == "org/other"
    file.write_text("no-such-option: 1")
    for command, why in ((f"--config {file}", "no such option"), ("--config none.yaml", "cannot be read")):
        done = run(f"whorl serve org/m {command}")
        assert (done.exit_code, why in done.output) == (2, True), done.output
