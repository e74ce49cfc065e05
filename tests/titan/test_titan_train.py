"""`whorl train`: recipes, the command, text, what is shown; and one whole run, cut off from the network and resumed."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import titan_job
import titan_tasks
import torch
from rich.console import Console
from titan_models import job
from typer.testing import CliRunner

from whorl.cli import app
from whorl.titan import cpu, display, train_command

pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> None:
    cpu.install()
    from whorl.titan.register import register

    register()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


# ---- recipes


def parsed(name: str) -> Any:
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--job.config_file", str(train_command.RECIPES / f"{name}.toml")])


@pytest.mark.parametrize("name", train_command.recipes())
def test_a_recipe_is_whole(name: str) -> None:
    from torchtitan.protocols.train_spec import get_train_spec

    from whorl.titan.converters.table import CONVERTERS

    config = parsed(name)
    spec = get_train_spec(config.model.name)
    assert config.model.flavor in spec.model_args
    assert set(config.model.converters) <= set(CONVERTERS)
    assert config.experimental.custom_import == "whorl.titan"
    assert Path(config.job.dump_folder) == Path("outputs") / name
    assert train_command.recipes()[name] == config.job.description
    assert config.whorl.stage == "sparse"


def test_the_trims() -> None:
    from whorl.titan.deepseek_v32.args import FLAVOURS

    for name in ("4l", "4l_top8", "8l", "8l_top8"):
        config = parsed(name)
        args = FLAVOURS[config.model.flavor]
        assert (args.n_layers, args.moe_args.num_experts) == (int(name[0]), 8)
        assert args.moe_args.top_k == (8 if "top8" in name else 2)
        assert (config.training.seq_len, config.training.local_batch_size) == (4096, 1)


def test_the_whole_model() -> None:
    from torchtitan.distributed import ParallelDims

    config = parsed("671b")
    degrees = config.parallelism
    parallel = (degrees.pipeline_parallel_degree, degrees.tensor_parallel_degree, degrees.expert_parallel_degree)
    assert (*parallel, config.training.seq_len, config.optimizer.swap) == (2, 4, 64, 32768, True)
    dims = ParallelDims(dp_shard=-1, dp_replicate=1, cp=1, tp=4, pp=2, ep=64, etp=1, world_size=128)
    assert dims.dp_shard == 16
    schedule_stages = 2
    assert config.training.local_batch_size >= schedule_stages, "a pipeline needs as many micro-batches as stages"


# ---- the command


def test_the_command_of_torchrun(tmp_path: Path) -> None:
    made = train_command.build_job("tiny", ["--training.steps", "3"], ranks=2, torchrun="")
    assert made.folder == Path("outputs/tiny")
    assert "--nproc-per-node=2" in made.command
    assert made.command[-2:] == ["--training.steps", "3"]
    assert "--rdzv-endpoint=localhost:0" in made.command
    many = train_command.build_job("tiny", [], ranks=16, torchrun="--nnodes=8 --node-rank=1")
    assert {"--nnodes=8", "--node-rank=1"} <= set(many.command)
    assert "--rdzv-endpoint=localhost:0" not in many.command
    plain = tmp_path / "plain.toml"
    plain.write_text('[model]\nname = "llama3"\n')
    made = train_command.build_job(str(plain), ["--job.dump-folder=there"], ranks=1, torchrun="")
    assert made.folder == Path("there")
    assert made.command[made.command.index("--job.custom_config_module") + 1] == "whorl.titan.config"
    done = run("tiny", "--dry-run", "--ranks", "3", "--training.steps", "7", "--checkpoint.load_step=-1")
    assert done.exit_code == 0, done.output
    assert done.output.split()[-3:] == ["--training.steps", "7", "--checkpoint.load_step=-1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("giant",), "no recipe 'giant', expected one of 4l, 4l_top8, 671b, 8l, 8l_top8, debug, tiny"),
        (("nothing.toml",), "nothing.toml: no such file"),
        (("--training.steps", "3", "tiny"), "give the recipe before TorchTitan's options"),
        (("tiny", "--steps", "3"), "no such option: --steps. TorchTitan's options are --section.name"),
        (("tiny", "--plan", "deepseek-v3.2"), "give exactly one of RECIPE"),
        (("--plan", "deepseek-v3.2", "--card", "8"), "no such option: --card"),
        (("--plot", "nowhere"), "no such file"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_a_folder_is_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train_command.set_aside(folder) is None
    for number in (1, 2):
        folder.mkdir()
        (folder / "x").write_text(str(number))
        aside = train_command.set_aside(folder)
        assert aside == tmp_path / f"run.{number}"
        assert (aside / "x").read_text() == str(number)
    assert not folder.exists()


def test_the_rank_that_failed_first_is_shown(tmp_path: Path) -> None:
    assert train_command.first_failure({tmp_path}) is None
    for rank, after in (("0", 2), ("1", 1), ("2", 3)):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "stderr.log").write_text(f"rank {rank}")
        (tmp_path / rank / "error.json").write_text("{}")
        os.utime(tmp_path / rank / "error.json", (after, after))
    assert train_command.first_failure({tmp_path}) == tmp_path / "1" / "stderr.log"
    for mark in tmp_path.rglob("error.json"):
        mark.unlink()
    assert train_command.first_failure({tmp_path}) == tmp_path / "0" / "stderr.log"


# ---- what is shown


def lines(*steps: int, loss: float = 2.0) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss / step, "grad_norm": 1.5, "tokens_per_second": 1234.5} for step in steps]


STEPS = ("--training.steps", "3", "--metrics.log_freq", "1", "--checkpoint.no_enable")
HEAD = {"run": {"model": "deepseek_v32", "flavor": "tiny", "ranks": 2, "device": "cpu", "steps": 9}}


def write(folder: Path, *added: dict[str, Any], end: str = "\n") -> None:
    with (folder / display.FILE).open("a") as file:
        file.write("\n".join(json.dumps(line) for line in added) + end)


def test_a_resumed_run_counts_once(tmp_path: Path) -> None:
    write(tmp_path, HEAD, *lines(1, 2, 3, 4, 5))
    write(tmp_path, HEAD, *lines(3, 4, loss=8))
    steps = display.read(tmp_path).steps
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] == 2


def test_half_a_line_waits(tmp_path: Path) -> None:
    tail = display.Tail(tmp_path / display.FILE)
    assert tail.read() == []
    write(tmp_path, HEAD, *lines(1), end="\n" + json.dumps(lines(2)[0])[:9])
    assert [line.get("step") for line in tail.read()] == [None, 1]
    write(tmp_path, end=json.dumps(lines(2)[0])[9:] + "\n")
    assert tail.read() == lines(2)


def test_steps_are_printed_as_they_come(tmp_path: Path) -> None:
    write(tmp_path, HEAD, *lines(1, 2))  # an earlier run's
    out = io.StringIO()
    with display.Display(tmp_path, Console(file=out)) as shown:
        write(tmp_path, HEAD, *lines(3), {"step": 4, "loss": "nan", "mfu": 41.25})
        shown.update()
    text = out.getvalue().splitlines()
    assert text[0] == "step 3  loss 0.6667  grad norm 1.500  tokens/s 1,234"
    assert text[1] == "step 4  loss nan  MFU 41.2 %"
    assert len(text) == 2


def test_a_terminal_has_a_table(tmp_path: Path) -> None:
    out = io.StringIO()
    with display.Display(tmp_path, Console(file=out, force_terminal=True, width=100)) as shown:
        shown.update()
        write(tmp_path, HEAD, *lines(1, 2, 3))
        shown.update()
    text = out.getvalue()
    for expected in ("starting", "deepseek_v32 tiny, 2 x cpu", "3/9", "indexer KL", "0.6667"):
        assert expected in text, expected


def test_the_shape_of_a_loss() -> None:
    assert display.sparkline([4, 3, 2, 1, 0]) == "^~-._"
    assert display.sparkline([float("nan")]) == ""
    assert len(display.sparkline(list(range(100)), 10)) == 10


def test_curves_are_plotted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, HEAD, *lines(1, 2, 3))
    done = run("--plot", str(tmp_path / "a"), "--plot", str(tmp_path / "b"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a" / "metrics.png").read_bytes()[:4] == b"\x89PNG"


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    from whorl.titan.metrics import JsonLines, peak_flops

    lines = JsonLines(tmp_path / "new" / display.FILE, HEAD["run"], knows_peak=False)
    lines.log({"loss_metrics/global_avg_loss": torch.tensor(float("nan")), "mfu(%)": 12.0, "other": 3}, 4)
    history = display.read(tmp_path / "new")
    assert history.run == HEAD["run"]
    assert history.steps == [{"step": 4, "loss": "nan", "other": 3}]
    assert peak_flops("NVIDIA H200", 989e12) == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", 312e12) == 312e12
    assert peak_flops("Some new card", 312e12) is None, "TorchTitan's guess"
    assert peak_flops("Ascend910_9392", 312e12) == 376e12


def test_a_model_without_metrics_of_its_own_is_shown(tmp_path: Path) -> None:
    """As TorchTitan's own models are: they have its metrics processor."""
    titan_job.run(["--job.dump_folder", str(tmp_path), *STEPS], function=titan_tasks.with_torchtitans_metrics)
    history = display.read(tmp_path)
    assert history.run["steps"] == 3
    assert [line["step"] for line in history.steps] == [1, 2, 3]
    assert all(line["loss"] > 1 and line["grad_norm"] > 0 for line in history.steps)
    assert history.end == {"steps": 3}


@pytest.mark.parametrize(("schedule", "rank"), [("1F1B", 6), ("ZBVZeroBubble", 0), ("DualPipeV", 0), ("dualpipev", 0)])
def test_the_rank_that_knows_the_loss_tells_it(schedule: str, rank: int) -> None:
    from whorl.titan.metrics import metrics_rank

    config = job()
    config.parallelism.pipeline_parallel_schedule = schedule
    dims: Any = SimpleNamespace(pp_enabled=True, world_size=8, pp=4)
    assert metrics_rank(dims, config) == rank


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 lets a rank of a V send to itself, where gloo hangs")
def test_a_v_shaped_pipeline_tells_loss_and_divergence(tmp_path: Path) -> None:
    """Through the trainer: the loss, and the indexers' of every layer."""
    pipeline = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "DualPipeV")
    more = (
        "--model.flavor",
        "deeper",
        "--training.steps",
        "2",
        "--training.local_batch_size",
        "4",
        "--metrics.log_freq",
        "1",
    )
    titan_job.run(["--job.dump_folder", str(tmp_path), *pipeline, *more], size=2)
    for step in display.read(tmp_path).steps:
        assert step["loss"] > 1
        divergences = {name: value for name, value in step.items() if name.startswith("indexer_kl/")}
        assert divergences
        assert min(divergences.values()) > 0, divergences


# ---- text


def loader(config: Any, rank: int = 0, ranks: int = 1) -> Any:
    from whorl.titan.data import build_dataloader, build_tokenizer

    return build_dataloader(dp_world_size=ranks, dp_rank=rank, tokenizer=build_tokenizer(config), job_config=config)


def text_job(folder: Path | str, **more: Any) -> Any:
    config = job(data=str(folder), tokenizer="bytes", **more)
    config.model.name, config.model.flavor = "deepseek_v32", "tiny"
    config.training.seq_len, config.training.local_batch_size = 8, 2
    return config


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("the second file, in bytes: \u00e9")
    (tmp_path / "a.md").write_text("the first one")
    (tmp_path / "c.jsonl").write_text('{"text": "a document"}\n{"text": "another"}\n')
    (tmp_path / "not.bin").write_bytes(b"\xff" * 100)
    return tmp_path


def batches(loaded: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    steps = iter(loaded)
    return [(inputs["input"], labels) for inputs, labels in (next(steps) for _ in range(count))]


def test_an_epoch_reads_every_window_once(texts: Path) -> None:
    from whorl.titan.data import ByteTokenizer

    whole = b"the first one|the second file, in bytes: \xc3\xa9|a document|another|".replace(b"|", b"\0")
    loaded = loader(text_job(texts))
    windows = (len(whole) - 1) // 8
    config = text_job(texts)
    config.training.local_batch_size = windows
    (inputs, labels), (again, _) = batches(loader(config), 2)
    expected = torch.tensor([*whole]).where(torch.tensor([*whole]) > 0, torch.tensor(256))
    by_start = sorted(inputs.tolist())
    assert by_start == sorted(expected[: windows * 8].view(-1, 8).tolist())
    assert sorted(again.tolist()) == by_start
    assert again.tolist() != inputs.tolist(), "an epoch has an order of its own"
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert ByteTokenizer().decode(ByteTokenizer().encode("d\u00e9j\u00e0", add_eos=True)) == "d\u00e9j\u00e0"
    assert loaded.source.windows == windows


def test_ranks_share_the_windows_and_may_change(texts: Path) -> None:
    alone = [row.tolist() for inputs, _ in batches(loader(text_job(texts)), 8) for row in inputs]
    pair = [loader(text_job(texts), rank, 2) for rank in (0, 1)]
    both = [batches(one, 2) for one in pair]
    mixed = [both[rank][step][0][row].tolist() for step in range(2) for row in range(2) for rank in (0, 1)]
    assert mixed == alone[:8]
    state = pair[0].state_dict()
    assert state == pair[1].state_dict(), "one state for all ranks"
    resumed = loader(text_job(texts))
    resumed.load_state_dict(state)
    assert [row.tolist() for inputs, _ in batches(resumed, 4) for row in inputs] == alone[8:16]


def test_synthetic_tokens_resume(tmp_path: Path) -> None:
    first = loader(text_job("synthetic"))
    expected = batches(first, 4)
    assert expected[0][0].max() >= 257, "of the model's vocabulary, not the tokenizer's"
    again = loader(text_job("synthetic"))
    again.load_state_dict({**first.state_dict(), "seen": 4})
    for batch, expected_batch in zip(batches(again, 2), expected[2:], strict=True):
        assert torch.equal(batch[0], expected_batch[0])


def test_the_default_text_is_the_standard_library() -> None:
    from whorl.titan.data import text_files

    names = {path.name for path in text_files("", "")}
    assert {"abc.py", "argparse.py"} <= names
    assert not any("site-packages" in str(path) for path in text_files("", ""))


def test_another_text_is_refused(texts: Path) -> None:
    state = loader(text_job(texts)).state_dict()
    (texts / "a.md").write_text("a changed one")
    with pytest.raises(ValueError, match=r"the text of the checkpoint's data is .*exclude_from_loading dataloader"):
        loader(text_job(texts)).load_state_dict(state)


def test_bad_text_is_named(texts: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        loader(text_job(texts / "missing"))
    with pytest.raises(ValueError, match=r"no file under .* ends in one of .xyz"):
        loader(text_job(texts, data_suffixes=".xyz"))
    (texts / "c.jsonl").write_text('{"words": "none"}\n')
    with pytest.raises(ValueError, match=r"c.jsonl:1: expected an object with a field 'text'"):
        loader(text_job(texts))
    (texts / "short.txt").write_text("ab")
    with pytest.raises(ValueError, match="have 3 tokens, fewer than a sequence of 8"):
        loader(text_job(texts / "short.txt"))
    config = text_job(texts)
    config.whorl = job(tokenizer="hf").whorl
    with pytest.raises(ValueError, match="has none of tokenizer"):
        loader(config)


# ---- a whole run

# In every process of the run: a connection to another machine is an error, and leaves a mark.
NO_NETWORK = """
import os, socket
_connect = socket.socket.connect
def connect(self, address):
    host = address[0] if isinstance(address, tuple) else "localhost"
    if host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()):
        open(os.environ["NETWORK_MARK"], "a").write(f"{address}\\n")
        raise OSError(f"no network here: {address}")
    return _connect(self, address)
socket.socket.connect = connect
"""
SMALL = ["--training.seq_len", "32", "--training.local_batch_size", "4", "--checkpoint.interval", "6"]


def environment(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    ours = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NETWORK_MARK": str(folder / "mark"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, "TRITON_INTERPRET": "0"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "whorl", "train", *arguments]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
def test_tiny_trains_and_resumes_exactly(tmp_path: Path) -> None:
    done = train(tmp_path, "tiny", "--training.steps", "12", *SMALL)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()
    assert "step 12  loss" in done.stdout
    whole = display.read(tmp_path / "outputs" / "tiny")
    assert [line["step"] for line in whole.steps] == [*range(1, 13)]
    losses = [line["loss"] for line in whole.steps]
    assert sum(losses[-3:]) / 3 < losses[0] - 1, losses
    assert all(line["indexer_kl"] > 0 and line["grad_norm"] > 0 for line in whole.steps)
    assert "mfu" not in whole.steps[-1], "nobody knows the peak of this CPU"
    assert whole.run["ranks"] == 1

    # The folder as it was after 6 steps.
    shutil.rmtree(tmp_path / "outputs" / "tiny" / "checkpoint" / "step-12")
    done = train(tmp_path, "tiny", "--training.steps", "12", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "step 7  loss" in done.stdout
    assert "step 6  loss" not in done.stdout
    again = display.read(tmp_path / "outputs" / "tiny")
    for key in ("loss", "grad_norm", "indexer_kl", "lr", "tokens"):
        actual, expected = ([line[key] for line in history.steps] for history in (again, whole))
        assert actual == expected, key


@pytest.mark.slow
def test_a_failure_shows_the_reason(tmp_path: Path) -> None:
    done = train(tmp_path, "tiny", "--whorl.data", "nowhere")
    assert done.returncode == 1
    assert "nowhere is neither a file nor a folder" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("tiny", "--ranks", "2", "--training.steps", "100000", *SMALL),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first.startswith("step 1 "), first
        process.send_signal(getattr(signal, name))
        said = process.communicate(timeout=90)[1]
    finally:
        process.kill()
    if name != "SIGKILL":
        assert process.returncode == 1
        assert "stopped; the same command resumes" in said
    deadline = time.monotonic() + 30
    while (left := ranks_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


def ranks_in(folder: Path) -> list[int]:
    """Processes that work there."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == folder and b"whorl.titan.worker" in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
        except OSError:
            continue
    return pids
