"""A format with an arrangement of codes of its own: one file and one row of `LAYOUTS`, and operators read the codes.

The dtype of the codes is that of `int4_paired`, which says nothing of their order.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import without_cpu_kernels
from mock_model import ByteTokenizer
from one_sequence import PROMPT, Runner, close
from safetensors.torch import save_file
from torch import Tensor

from whorl import nn, ops
from whorl.engine import weights
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.models.qwen3 import Qwen3
from whorl.nn.weights import FORMATS, laid_out
from whorl.nn.weights.quantised import Pick, Quantised
from whorl.ops.quantised import layout

METHOD = "reversed-bytes"
REVERSED = layout.Layout(
    dtypes=(torch.uint8,), width=lambda columns: columns, unpack=lambda codes, columns: codes.flip(-1), middle=128
)


@dataclass(frozen=True, slots=True)
class ReversedBytes(Quantised):
    """codes [N, K] uint8, 128 for zero, from the last column to the first once they are loaded; scales [N, 1]."""

    def tensors(self, matrix: nn.Matrix) -> dict[str, Tensor]:
        codes = torch.empty(matrix.shape, dtype=torch.uint8)
        return {"codes": codes, "scales": torch.empty(*matrix.shape[:-1], 1)}

    def destinations(self, matrix: Any, part: nn.Part) -> Iterator[tuple[str, nn.Destination]]:
        index = part.rows, part.columns
        yield "codes", nn.Destination(into=matrix.codes[part.place], shape=part.shape, index=index, dtype=torch.uint8)
        index, shape = (part.rows, slice(0, 1)), (part.shape[0], 1)
        yield "scale", nn.Destination(into=matrix.scales[part.place], shape=shape, index=index)

    def finish(self, matrix: Any) -> None:
        matrix.replace(codes=matrix.codes.flip(-1).contiguous(), scales=matrix.scales.data)
        matrix.packing = laid_out.Packing(1, 0, "reversed")

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        return laid_out.values_of(matrix, pick)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        matrix.codes.random_(0, 256, generator=generator)
        matrix.scales.fill_((2**16 / 12 * matrix.shape[-1]) ** -0.5)
        self.finish(matrix)


def formats(settings: Mapping[str, Any]) -> nn.Formats:
    return nn.Formats(of=lambda name: ReversedBytes())


CONFIG = Qwen3.tiny(hidden_size=64, num_experts=4, num_hidden_layers=2, mlp_only_layers=[1], attention_bias=True)
SETTINGS = {"quantization_config": {"quant_method": METHOD}}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, METHOD, f"{__name__}:formats")
    monkeypatch.setitem(layout.LAYOUTS, "reversed", REVERSED)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In the format, and the same values in fp32."""
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    model = weights.random_model(CONFIG, device="cpu", dtype=torch.float32)
    for name, destination in nn.destinations(model).items():
        dense[name] = destination.into.clone()
        if destination.into.ndim == 1:
            coded[name] = dense[name]
            continue
        scale = dense[name].abs().amax(-1, keepdim=True) / 127
        numbers = (dense[name] / scale).round()
        dense[name] = numbers * scale
        stem = name.removesuffix("weight")
        coded |= {f"{stem}codes": (numbers + 128).byte(), f"{stem}scale": scale}
    folder = tmp_path_factory.mktemp("checkpoints")
    return write(folder / "coded", CONFIG | SETTINGS, coded), write(folder / "dense", CONFIG, dense)


def load(path: Path) -> Any:
    return weights.load_model(path, device="cpu", dtype="float32", unpack=False, progress=False)


def test_operators_read_it(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers, fused projections, experts, embedding and head, against the values."""
    seen: set[str] = set()
    for op in ("packed_linear", "packed_experts"):
        own = ops.OPS[op].reference
        patched = lambda *a, own=own, op=op, **k: seen.add(op) or own(*a, **k)  # noqa: E731
        monkeypatch.setattr(ops.OPS[op], "reference", patched)
    coded, dense = (load(path) for path in checkpoints)
    with without_cpu_kernels():
        close(Runner(coded).run(PROMPT), Runner(dense).run(PROMPT))
    assert seen == {"packed_linear", "packed_experts"}
    close(Runner(coded).run(PROMPT), Runner(dense).run(PROMPT))
    monkeypatch.setitem(layout.LAYOUTS, "reversed", replace(REVERSED, unpack=lambda codes, columns: codes))
    with pytest.raises(AssertionError):
        close(Runner(coded).run(PROMPT), Runner(dense).run(PROMPT))


def test_the_engine_generates_with_it(checkpoints: tuple[Path, Path]) -> None:
    params, tokenizer = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), ByteTokenizer()
    engines = (LLM(path, tokenizer=tokenizer, device="cpu", num_blocks=16, unpack=False) for path in checkpoints)
    coded, dense = (llm.generate([[1, 2, 3], [9] * 20], params, progress=False) for llm in engines)
    assert [output.token_ids for output in coded] == [output.token_ids for output in dense]


def test_random_weights_in_it() -> None:
    model: Any = weights.random_model(CONFIG | SETTINGS, device="cpu", dtype=torch.float32)
    for matrix in (module for module in model.modules() if isinstance(module, nn.Matrix)):
        assert matrix.format.values(matrix).std() == pytest.approx(matrix.shape[-1] ** -0.5, rel=0.1)
    assert Runner(model).run(PROMPT).isfinite().all()
