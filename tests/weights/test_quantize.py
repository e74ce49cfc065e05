"""`whorl quantize` and --quantize: what is written, read back by the library that others use, and by whorl."""

import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer
from one_sequence import close
from quant_checkpoints import model as config
from safetensors.torch import load_file, save_file
from test_quant_formats import load, logits, matrices
from torch import Tensor
from typer.testing import CliRunner

from whorl.cli import app
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import rewrite
from whorl.files import CannotWrite
from whorl.nn.weights import SCHEME_NAMES
from whorl.nn.weights.dense import DENSE
from whorl.nn.weights.rounding import SCHEMES, Rounding

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
OUT = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = write_checkpoints(
        tmp_path_factory.mktemp("models"), {kind: config(kind, SIZES) for kind in ("llama", "moe")}
    )
    for path in folders.values():
        tensors = load_file(path / "model.safetensors")
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
        (path / "tokenizer.json").write_text('{"kept": true}')
        (path / "model.py").write_text("code")
    return folders


def whole(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def by_the_library(path: Path) -> dict[str, Tensor]:
    """Weights of the quantised modules, as compressed-tensors dequantises them from config.json and the files."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors")
    settings = quantization.QuantizationConfig.model_validate(
        json.loads((path / "config.json").read_text())["quantization_config"]
    )
    (scheme,) = settings.config_groups.values()
    compressor = base.BaseCompressor.get_value_from_registry(settings.format)
    tensors, weights = whole(path), {}
    for name in tensors:
        module = name.removesuffix(".weight_scale")
        if module != name:
            ends = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
            weights[module] = compressor.decompress(ends, scheme)["weight"]
    return weights


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_the_library_reads_the_same_numbers(
    scheme: str, kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "SHARD_BYTES", 30_000)
    out = tmp_path / "out"
    report = rewrite.quantize_folder(str(folders[kind]), out, scheme=scheme, progress=False)
    theirs, original = by_the_library(out), whole(folders[kind])
    model = load(out, dtype="bfloat16")
    count = 0
    for name, matrix in matrices(model).items():
        values = matrix.format.values(matrix)
        for part in matrix.parts if matrix.format != DENSE else ():
            source, count = part.source(name), count + 1
            assert torch.equal(values[part.place], theirs[source]), source
            error = (theirs[source].double() - original[f"{source}.weight"].double()).norm()
            relative = float(error / original[f"{source}.weight"].double().norm())
            assert report.modules[source].error == pytest.approx(relative, rel=0.05)  # theirs is rounded to bf16
    assert count == len(theirs) == len(report.modules) > 10
    limits = {"w4a16": 0.12, "w8a8": 0.01, "fp8": 0.03}
    assert 0.0005 < max(each.error for each in report.modules.values()) < limits[scheme]
    assert model.lm_head.format == DENSE
    # everything else is as it was
    after = whole(out)
    for name, tensor in original.items():
        if name in after and name.removesuffix(".weight") not in theirs:
            assert torch.equal(after[name], tensor), name
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert (out / "tokenizer.json").read_text() == '{"kept": true}'
    assert not (out / "model.py").exists()
    assert not list(tmp_path.glob("*.partial"))
    # and the same model is made while loading
    assert torch.equal(logits(load(folders[kind], dtype="bfloat16", quantize=scheme)), logits(model))


def test_less_error_than_without_a_search() -> None:
    """Against the largest magnitude as the largest number; a group of zeros stays zeros; scales have 16 bits."""
    weight = torch.randn(33, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, :128] = 0
    ends, off, size = Rounding(SCHEMES["w4a16"], 128).apply(weight)
    assert ends["weight_scale"].dtype == torch.bfloat16
    groups = weight.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / scale).nan_to_num().round().clamp(-8, 7) * scale - groups).square().sum()
    assert off < 0.9 * plain
    assert size == pytest.approx(float(weight.double().square().sum()))
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = library.unpack_from_int32(ends["weight_packed"], 4, torch.Size([33, 256]))
    assert not codes[3, :128].any()
    assert ends["weight_scale"][3, 0] == 1


def test_names_of_schemes_are_those_of_their_table() -> None:
    """The names are listed where torch is not imported."""
    assert list(SCHEME_NAMES) == list(SCHEMES)


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32), (40, 8)])
def test_groups_that_fit_every_matrix(columns: int, group: int) -> None:
    from whorl.nn.weights.rounding import group_size

    assert group_size({"a": 256, "b": columns}) == group
    with pytest.raises(ValueError, match="b has 36 columns, expected a multiple of 8; leave it unquantised"):
        group_size({"a": 256, "b": 36})


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(folders["llama"], out, "--format", "w8a8", "--ignore", OUT, "--ignore", "re:.*down_proj$")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["layer", "0", "1"]
    assert "w8a8" in lines[-1]
    assert f"{OUT}.weight_scale" not in whole(out)
    assert "model.layers.1.self_attn.o_proj.weight_scale" in whole(out)
    assert not any("down_proj.weight_scale" in name for name in whole(out))
    with pytest.raises(ValueError, match="are stored as one matrix"):
        rewrite.quantize_folder(str(folders["llama"]), tmp_path / "x", scheme="fp8", ignore=["re:.*q_proj"])
    done = run(folders["moe"], tmp_path / "other", "--json")
    document = json.loads(done.output)
    assert document["format"] == "w4a16"
    assert document["bytes_after"] < document["bytes_before"]
    assert set(document["layers"]) == {"0", "1"}


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(folders["llama"], out).exit_code == 0
    for arguments, message in (
        ((folders["llama"], out), "it exists; give a new folder"),
        ((out, tmp_path / "twice"), "the weights are already quantised"),
        ((folders["llama"], tmp_path / "x", "--ignore", "re:("), "is not a regular expression"),
        ((folders["llama"], tmp_path / "x", "--ignore", "re:.*"), "nothing is left to be quantised"),
        ((tmp_path / "nowhere", tmp_path / "x"), "no such file or folder"),
        ((folders["llama"], tmp_path / "x", "--format", "int3"), "int3"),
    ):
        done = run(*arguments)
        assert (done.exit_code, message in done.output) == (2, True), done.output
    (tmp_path / "y.partial").mkdir()
    assert "is left over from a run that did not end" in run(folders["llama"], tmp_path / "y").output
    with pytest.raises(ValueError, match="quantize is 'int3', expected None, 'w4a16', 'w8a8', 'fp8' or 'cpu4'"):
        load(folders["llama"], quantize="int3")


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of up to 4 KiB: what writes more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_cannot_be_written_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, small_files: None
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CannotWrite, match=r"out\.partial/0\.partial: cannot be written: File too large"):
        rewrite.quantize_folder(str(folders["llama"]), out, scheme="fp8", progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="file/out: cannot be written: Not a directory"):
        rewrite.quantize_folder(str(folders["llama"]), tmp_path / "file" / "out", scheme="fp8", progress=False)
    with pytest.raises(CannotWrite, match="File name too long"):
        rewrite.quantize_folder(str(folders["llama"]), tmp_path / ("n" * 300), scheme="fp8", progress=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out"]


def test_modes_of_files_are_the_umasks(folders: dict[str, Path], tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        rewrite.quantize_folder(str(folders["llama"]), tmp_path / "out", scheme="fp8", progress=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_numbers_that_cannot_be_rounded(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.mkdir()
    (path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    tensors = whole(folders["llama"])
    tensors[f"{OUT}.weight"][1, 2] = torch.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{OUT}\.weight has an infinity or NaN"):
        rewrite.quantize_folder(str(path), tmp_path / "out", scheme="fp8", progress=False)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_the_engine_quantises_while_loading(folders: dict[str, Path]) -> None:
    tokenizer: Any = ByteTokenizer()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = {}
    for unpack in (True, False):
        settings: Any = {"device": "cpu", "num_blocks": 16, "quantize": "w4a16", "unpack": unpack}
        llm = LLM(folders["llama"], tokenizer=tokenizer, **settings)
        outputs[unpack] = llm.generate([[1, 2, 3]], params, progress=False)[0].token_ids
        assert (llm.model.model.layers[0].mlp.down_proj.format == DENSE) == unpack  # type: ignore[attr-defined]
    assert outputs[True] == outputs[False]


def test_a_gguf_file_is_quantised_anew(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from test_gguf_weights import GGUFS, write_gguf
    from test_models import save

    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", save(tmp_path / "hf", GGUFS["llama"][1]), gguf.GGMLQuantizationType.Q8_0)
    close(logits(load(path, quantize="w8a8")), logits(load(path, unpack=True)), bound=0.1)
    with pytest.raises(ValueError, match="a GGUF file is already quantised"):
        rewrite.quantize_folder(str(path), tmp_path / "out", scheme="fp8")
