"""From trainer to server: checkpoints of `whorl train` are read as they lie, and exported, by the engine."""

import contextlib
import os
import pickle
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import Runner
from serving import answers, wait_until
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.filesystem import _StorageInfo

from whorl import digests
from whorl.checkpoint_index import METADATA, read_index
from whorl.engine import weights
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.tokenizer import Tokenizer
from whorl.engine.weights import dcp
from whorl.models.deepseek_v32 import NAMES

pytest.importorskip("torchtitan")

import torch.distributed.checkpoint as torch_dcp
from tiny_deepseek import make_model, tiny

from whorl.titan.checkpoint_files import is_unfinished, read_complete
from whorl.titan.deepseek_v32.args import FLAVOURS
from whorl.titan.deepseek_v32.hf import export_checkpoint
from whorl.titan.served_files import describer

TOKENS = [(7 * i * i + 3) % 251 for i in range(60)]


def trained(**changes: Any) -> Any:
    model = make_model(tiny(**changes))
    with torch.no_grad():
        for layer in model.layers.values():
            if layer.moe_enabled:
                layer.moe.expert_bias.normal_(std=0.2)
                layer.moe.router.gate.weight.mul_(20)  # or all experts look alike
    return model.eval()


def written(model: Any, run: Path) -> Path:
    """As a trainer's checkpoint lies in the folder of its run."""
    folder = run / "checkpoint" / "step-12"
    describer(model.model_args.hf_config("float32"), is_bytes=True, assets=Path())(folder)
    beside = {"optimizer.state.norm.weight.exp_avg": torch.zeros(3), "train_state.step": torch.tensor(12)}
    torch_dcp.save(model.state_dict() | beside, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("changes", [{}, {"n_mtp_layers": 1, "index_topk": 64}])
def test_the_engine_computes_what_the_trainer_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """In fp32 to 2e-6 of the largest logit (observed 3e-7): products are torch's own there and tiles here."""
    model = trained(**changes)
    folder = written(model, tmp_path / "run")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]))[0]
    (tmp_path / "run/checkpoint/step-13").mkdir()  # was never finished
    assert weights.resolve(tmp_path / "run") == weights.resolve(tmp_path / "run/checkpoint") == folder
    export_checkpoint(folder, model.model_args, tmp_path / "exported", torch.float32)
    outputs = []
    for path in (tmp_path / "run", tmp_path / "exported"):
        served = weights.load_model(path, device="cpu", progress=False)
        outputs.append(Runner(served).run(TOKENS))
        assert float((outputs[-1] - expected).abs().max() / expected.abs().max()) < 2e-6
    assert torch.equal(*outputs)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_bytes_in_bytes_out(tmp_path: Path) -> None:
    folder = written(trained(), tmp_path)
    llm = LLM(folder, device="cpu", num_blocks=32)
    text = "a\u00ef\u2603 \n\x00~"
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_ids, len(tokenizer)) == ((256,), 257)
    (output,) = llm.generate(["abc"], SamplingParams(temperature=2.0, seed=1, max_tokens=40), progress=False)
    assert max(output.token_ids) <= 256, "the model has 512 rows, and the tokenizer as many as are trained"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_changed_bytes_are_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(trained(), tmp_path)
    weights.load_model(folder, device="cpu", progress=False)
    assert f"{folder} has no SHA256SUMS: changed bytes in its files would not be noticed" in caplog.text
    digests.write(folder, {path.name: digests.digest(path) for path in folder.iterdir()})
    caplog.clear()
    weights.load_model(folder, device="cpu", progress=False)
    assert not caplog.text
    for name in ("__0_0.distcp", "tokenizer.json", "config.json"):
        whole = (folder / name).read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{folder}: {name} is not as it was written: its SHA-256 is \w+"):
            weights.load_model(folder, device="cpu", progress=False)
        (folder / name).write_bytes(whole)


def test_a_folder_without_its_index_was_never_finished(tmp_path: Path) -> None:
    """Whatever lies beside the data for a server."""
    describer(trained().model_args.hf_config("float32"), is_bytes=True, assets=Path())(tmp_path)
    assert is_unfinished(tmp_path)
    (tmp_path / ".config.4711.partial.json").write_text("{")  # of a run that was killed while it wrote the file
    assert is_unfinished(tmp_path)
    with pytest.raises(ValueError, match="it is incomplete"):
        read_complete(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"data")
    assert is_unfinished(tmp_path)
    with pytest.raises(ValueError, match="it is incomplete"):
        read_complete(tmp_path)
    (tmp_path / "notes.txt").write_text("somebody else's")
    assert not is_unfinished(tmp_path)


# ---- train, serve, ask

TEXT = "Ask the harbour master when the tide turns; he keeps the bell, the lamp and the book of ships. "


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """`whorl serve` of a folder, in a process of its own; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "whorl", "serve", str(folder), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}"), seconds=180)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


# What a CPU needs to learn it: of `debug`, whose recipe is an accelerator's, short sequences in fp32.
LEARNT = {
    "tiny": {"training.steps": 150},
    "debug": {
        "training.steps": 160,
        "training.seq_len": 64,
        "training.local_batch_size": 3,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 2e-3,
        "lr_scheduler.warmup_steps": 5,
        "whorl.health_every": 0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LEARNT)
def test_what_was_trained_is_served(recipe: str, tmp_path: Path) -> None:
    """`whorl train` learns a sentence by heart, and `whorl serve` goes on in it: the run's folder as it lies, and
    exported."""
    openai = pytest.importorskip("openai")
    (tmp_path / "text.txt").write_text(TEXT * 80)
    command = [sys.executable, "-m", "whorl", "train", recipe, "--whorl.data", str(tmp_path / "text.txt")]
    options = LEARNT[recipe] | {"job.dump_folder": tmp_path / "run"}
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    step = tmp_path / f"run/checkpoint/step-{options['training.steps']}"
    export_checkpoint(step, FLAVOURS[recipe], tmp_path / "exported", torch.float32)
    for folder in (tmp_path / "run", tmp_path / "exported"):
        with served(folder) as url:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            model = client.models.list().data[0]
            for cut in (10, 31):
                body = {"prompt": TEXT[:cut], "max_tokens": 20, "temperature": 0}
                answer = client.completions.create(model=model.id, **body)
                assert answer.choices[0].text == TEXT[cut : cut + 20]


# ---- pieces


def pieces(folder: Path, tensors: dict[str, torch.Tensor], cut: int) -> Path:
    """A checkpoint of two ranks: the first `cut` rows of every tensor are the first one's."""
    entries: dict[str, Any] = {"train_state.step": index.BytesStorageMetadata()}
    places, files = {}, [b"", b""]
    for name, tensor in tensors.items():
        chunks = []
        for rank, part in enumerate((tensor[:cut], tensor[cut:])):
            offsets = torch.Size([rank * cut, *[0] * (tensor.dim() - 1)])
            chunks.append(index.ChunkStorageMetadata(offsets=offsets, sizes=part.shape))
            path = folder / "piece"
            torch.save(part.clone(), path)
            data = path.read_bytes()
            key = index.MetadataIndex(fqn=name, offset=offsets)
            places[key] = _StorageInfo(f"__{rank}_0.distcp", len(files[rank]), len(data))
            files[rank] += data
        properties = index.TensorProperties(dtype=tensor.dtype)
        entries[name] = index.TensorStorageMetadata(properties=properties, size=tensor.shape, chunks=chunks)
    for rank, data in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(data)
    (folder / METADATA).write_bytes(pickle.dumps(index.Metadata(state_dict_metadata=entries, storage_data=places)))
    return folder


def test_pieces_of_several_ranks(tmp_path: Path) -> None:
    experts, gate = torch.randn(5, 4, 6), torch.randn(5, 6)
    tensors = {"layers.3.moe.experts.w1": experts, "layers.3.moe.router.gate.weight": gate}
    sources = dcp.open_dcp(pieces(tmp_path, tensors, cut=3), NAMES)
    each = [sources[f"model.layers.3.mlp.experts.{i}.gate_proj.weight"] for i in range(5)]
    assert [source.shape for source in each] == [(4, 6)] * 5
    assert torch.equal(torch.stack([source.read((slice(1, 3), slice(0, 6))) for source in each]), experts[:, 1:3])
    for rows in (slice(0, 5), slice(2, 4), slice(0, 3), slice(3, 5)):
        part = sources["model.layers.3.mlp.gate.weight"].read((rows, slice(2, 5)))
        assert torch.equal(part, gate[rows, 2:5])
    assert len(sources) == 6
    read = read_index(tmp_path)
    read.state_dict_metadata["layers.3.moe.experts.w1"].chunks.pop()
    (tmp_path / METADATA).write_bytes(pickle.dumps(read))
    lost = dcp.open_dcp(tmp_path, NAMES)["model.layers.3.mlp.experts.4.gate_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.3\.moe\.experts\.w1 hold 0 of its 24 numbers"):
        lost.read((slice(0, 4), slice(0, 6)))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo run > was_run",)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"its \.metadata cannot be read .*system, which no such index has"):
        dcp.open_dcp(tmp_path, NAMES)
    assert not (tmp_path / "was_run").exists()


def everything(folder: Path) -> dict[str, torch.Tensor]:
    sources = dcp.open_dcp(folder, NAMES)
    return {name: s.read(tuple(slice(0, size) for size in s.shape)) for name, s in sources.items()}


def refusal(folder: Path) -> str | None:
    try:
        everything(folder)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_ends_in_a_sentence(tmp_path: Path) -> None:
    """Whichever byte of an index or of data is another one: a ValueError that names the folder, or tensors with other
    names, which do not fit the model, or other values."""
    folder = pieces(tmp_path, {"norm.weight": torch.randn(8), "output.weight": torch.randn(6, 4)}, cut=4)
    draw, num_refused = random.Random(0), 0
    for path in (folder / METADATA, folder / "__0_0.distcp"):
        data = path.read_bytes()
        for _ in range(300):
            damaged = bytearray(data)
            damaged[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(damaged)
            if (problem := refusal(folder)) is not None:
                assert problem.startswith(str(folder))
                num_refused += 1
        path.write_bytes(data)
    assert num_refused > 150


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.state_dict_metadata.update({7: index.BytesStorageMetadata()}), "its entry 7 is damaged"),
        (lambda i: i.state_dict_metadata.update({"norm.weight": 3}), "AttributeError"),
        (lambda i: setattr(i.state_dict_metadata["norm.weight"], "size", torch.Size([4])), "'norm.weight' is damaged"),
        (lambda i: setattr(i.state_dict_metadata["norm.weight"], "size", [8]), "'norm.weight' is damaged"),
        (lambda i: setattr(i.state_dict_metadata["norm.weight"].properties, "dtype", 3), "'norm.weight' is damaged"),
        (lambda i: i.storage_data.popitem(), "'norm.weight' is damaged"),
        (lambda i: setattr(next(iter(i.storage_data.values())), "offset", -1), "its place of MetadataIndex"),
        (lambda i: setattr(next(iter(i.storage_data.values())), "relative_path", "../x"), "'../x' is not a file of"),
        (lambda i: setattr(next(iter(i.storage_data.values())), "transform_descriptors", ["zstd"]), "is transformed"),
        (lambda i: i.storage_data.clear(), "it names no data"),
    ],
)
def test_an_index_that_is_wrong(change: Any, message: str, tmp_path: Path) -> None:
    folder = pieces(tmp_path, {"norm.weight": torch.randn(8)}, cut=4)
    read = read_index(folder)
    change(read)
    (folder / METADATA).write_bytes(pickle.dumps(read))
    with pytest.raises(ValueError, match=f"{folder}: its .metadata cannot be read .*{message}"):
        dcp.open_dcp(folder, NAMES)


def test_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    folder = pieces(tmp_path, {"norm.weight": torch.randn(8)}, cut=4)
    (folder / "__1_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"__1_0.distcp has \d+ bytes, expected \d+"):
        dcp.open_dcp(folder, NAMES)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__1_0.distcp is missing: the checkpoint is incomplete"):
        dcp.open_dcp(folder, NAMES)
    with pytest.raises(ValueError, match=r"a trainer's checkpoint without config\.json"):
        weights.resolve(folder)
    with pytest.raises(ValueError, match="not trained here"):
        dcp.open_dcp(folder, None)
    (folder / METADATA).write_bytes((folder / METADATA).read_bytes()[:40])
    with pytest.raises(ValueError, match=r"cannot be read as an index of torch\.distributed\.checkpoint"):
        dcp.open_dcp(folder, NAMES)
