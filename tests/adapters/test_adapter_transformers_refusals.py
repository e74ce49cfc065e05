"""What the adapter for transformers refuses, and says of it."""

import subprocess
import sys

import pytest
import torch
from transformers_models import (
    build,
    transformers,
)

from whorl.adapters.transformers import install


def test_an_unknown_model_is_told_what_was_looked_for() -> None:
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=8))
    with pytest.raises(ValueError, match=r"no module of BertModel is known.*qwen3_vl.*found.*BertSelfAttention"):
        install(model)


def test_a_subclass_with_its_own_forward_is_not_ours_to_replace() -> None:
    model = build("qwen3")
    kind = type(model.model.norm)
    model.model.norm.__class__ = type("Scaled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    installation = install(model)
    assert "model.norm" not in {entry.path for entry in installation.replaced}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", {"rope": False, "norm": False, "swiglu": False}, "all options are False"),
        ("llama", {"qk_norm_rope": True}, r"LlamaAttention.forward differs in \['k_norm', 'q_norm'\]"),
    ],
)
def test_what_cannot_be_given_is_refused(family: str, options: dict[str, bool], message: str) -> None:
    model = build(family)
    with pytest.raises(ValueError, match=message):
        install(model, **options)
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_activation_is_refused() -> None:
    model = build("llama", hidden_act="gelu")
    with pytest.raises(ValueError, match=r"needs a SiLU gate; found \['GELUActivation'\]. Pass swiglu=False"):
        install(model)
    assert not any("forward" in vars(module) for module in model.modules())
    install(model, swiglu=False)


def test_a_method_of_someone_else_is_not_dropped() -> None:
    model = build("qwen3")
    model.model.norm.forward = theirs = lambda x: x
    with pytest.raises(RuntimeError, match=r"model\.norm already has its own forward"):
        install(model)
    assert model.model.norm.forward is theirs
    assert "forward" not in vars(model.model.rotary_emb)


def test_a_second_installation_is_refused() -> None:
    model = build("qwen3")
    install(model, swiglu=False)
    with pytest.raises(RuntimeError, match="already has its own forward"):
        install(model, norm=False)
    assert "forward" not in vars(model.model.layers[0].mlp)
    install(model, rope=False, norm=False)


def test_cos_and_sin_of_transformers_are_refused() -> None:
    model = build("qwen3")
    cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 32), torch.arange(3)[None])
    install(model)
    with pytest.raises(ValueError, match="must come from this model's own rotary module"):
        model.model.layers[0](torch.randn(1, 3, 32), position_embeddings=(cos, sin))


def test_importing_it_imports_no_transformers() -> None:
    code = "import sys, whorl.adapters.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
