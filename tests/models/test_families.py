"""Families that are Llama with little changed: on two ranks, in quantised formats, with an 8-bit cache, and refused."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from checkpoints import write_checkpoints
from one_sequence import PROMPT, Runner, close
from quant_checkpoints import CASES, write
from test_one_arithmetic import MODELS, SAMPLED, decoded, engine, prefilled
from test_quant_formats import load, logits
from torch import Tensor

from whorl import nn
from whorl.engine import weights
from whorl.models.gemma3 import Gemma3
from whorl.models.glm_moe_dsa import GlmMoeDsa
from whorl.models.llama import Llama
from whorl.models.mistral import Mistral
from whorl.models.qwen2 import Qwen2

FAMILIES: dict[str, type[Llama]] = {"gemma3": Gemma3, "mistral": Mistral, "qwen2": Qwen2}
LONG = PROMPT * 3  # past every window


def on_a_rank(paths: dict[str, Path]) -> dict[str, Tensor]:
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    models = {name: load(path, tp=mine, unpack=None) for name, path in paths.items()}
    return {name: Runner(model).run(LONG) for name, model in models.items()}


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Three key heads are shared unevenly."""
    wide = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 3}
    families = FAMILIES | {"glm5": GlmMoeDsa}
    paths = write_checkpoints(tmp_path, {name: each.tiny(**wide) for name, each in families.items()})
    one = {name: Runner(load(path, unpack=None)).run(LONG) for name, path in paths.items()}
    for result in ranks.shared(2).run(on_a_rank, paths):
        for name, expected in one.items():
            close(result[name], expected)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    "name", ["ct-w4-zeros", "awq", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fp8-partial", "ct-w8", "gptq"))]
)
def test_quantised_weights_are_those_of_the_dequantised_model(name: str, kind: str, tmp_path: Path) -> None:
    path, dense = write(tmp_path, CASES[name], FAMILIES[kind])
    assert torch.equal(logits(load(path)), logits(load(dense)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_rounded_while_they_are_read(kind: str, tmp_path: Path) -> None:
    """What Gemma's norms hold is not a matrix, and is left as it is."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    (path,) = write_checkpoints(tmp_path, {kind: FAMILIES[kind].tiny(**sizes)}).values()
    rounded, plain = (logits(load(path, quantize=scheme)) for scheme in ("w4a16", None))
    error = float((rounded - plain).norm() / plain.norm())
    assert 1e-3 < error < 0.5, error


def test_an_8_bit_cache_is_read_as_it_was_written() -> None:
    """Decoded and prefilled are one arithmetic over codes, too, past Gemma's windows."""
    llm = engine(MODELS["gemma3"](), kv_cache_dtype="fp8")
    (output,) = llm.generate([PROMPT], SAMPLED, progress=False)
    assert decoded(output) == prefilled(llm, output)


def test_what_is_known_of_others_holds() -> None:
    """Names that transformers has, nearest ones that run, and none of them among those that run."""
    import transformers

    from whorl.engine.weights import gguf
    from whorl.models import ARCHITECTURES
    from whorl.models.unsupported import UNSUPPORTED

    assert not set(UNSUPPORTED) & set(ARCHITECTURES)
    for name, known in UNSUPPORTED.items():
        assert hasattr(transformers, name), name
        assert known.nearest in ARCHITECTURES, name
        assert not set(known.gguf) & set(gguf.ARCHITECTURES), name


def test_windows_and_frequencies_of_gemma_s_layers() -> None:
    """As google/gemma-3-1b-it writes them: every sixth layer is global."""
    config: Any = Gemma3.config_class.from_hf(
        Gemma3.tiny(
            num_hidden_layers=13,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_theta=1000000,
            rope_local_base_freq=10000,
        )
    )
    assert [i for i, window in enumerate(config.windows) if window is None] == [5, 11]
    assert {window for window in config.windows if window} == {512}
    assert (config.rope.base, config.local_rope.base) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (Gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: softcaps are Gemma 2's"),
        (Gemma3, {"use_bidirectional_attention": True}, "EmbeddingGemma's"),
        (Gemma3, {"hidden_activation": "relu"}, "hidden_activation is 'relu', expected gelu_pytorch_tanh"),
        (Gemma3, {"layer_types": ["full_attention"]}, "expected 3 of sliding_attention, full_attention"),
        (Mistral, {"sliding_window": -1}, "sliding_window is -1, expected a whole number, 1 or more"),
        (Qwen2, {"use_sliding_window": True, "layer_types": [[], {}]}, "expected 2 of sliding_attention"),
    ],
)
def test_configurations_that_are_refused(make: type[Llama], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.build(make.tiny() | change, device="meta", dtype=torch.float32)
