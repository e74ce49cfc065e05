"""The rope types that vLLM's get_rope knows and transformers does not; the formulas are written here anew."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rope_models import DEEPSEEK

from whorl.rope_config import RopeConfig
from whorl.rope_table import get_rope


def _close(ours: np.ndarray, expected: torch.Tensor) -> None:
    """Compare fp32 frequencies with fp64 ones: they are rounded once."""
    np.testing.assert_allclose(ours, expected.numpy(), rtol=2.0**-23, atol=0)
    assert ours.dtype == np.float32


@pytest.mark.parametrize("factor", [2.0, 7.5])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_ntk(size: int, factor: float) -> None:
    config = RopeConfig.from_keywords(head_dim=size, max_position=4096, rope_type="ntk", factor=factor)
    i = torch.arange(0, size, 2, dtype=torch.float64)
    _close(config.frequencies(), (10000.0 * factor) ** (-i / size) / factor ** (2 / size))


@pytest.mark.parametrize("mixed_b", [0.6, 0.75, 1.0])
def test_ntk_mixed(mixed_b: float) -> None:
    keywords: dict[str, Any] = {"head_dim": 128, "max_position": 4096, "rope_type": "ntk", "factor": 12.0}
    config = RopeConfig.from_keywords(**keywords, mixed_b=mixed_b)
    a = math.log(12.0) / 64**mixed_b
    plain = 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    expected = plain * (-a * torch.arange(1, 65, dtype=torch.float64) ** mixed_b).exp()
    _close(config.frequencies(), expected)
    assert config.frequencies()[-1] == pytest.approx(plain[-1].item() / 12.0, rel=1e-6)
    assert (config == RopeConfig.from_keywords(**keywords)) == (mixed_b == 1.0)


def test_telechat3_is_yarn_with_another_attention_factor() -> None:
    rope = {"factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1e6}
    sizes = {"head_dim": 128, "max_position": 32768}
    telechat = RopeConfig.from_keywords(**sizes, rope_type="telechat3-yarn", **rope)
    yarn = RopeConfig.from_keywords(**sizes, rope_type="yarn", **rope)
    assert (telechat.frequencies() == yarn.frequencies()).all()
    assert telechat.attention_factor == pytest.approx(0.07 * math.log(4.0) + 1)
    assert telechat.table_rows == 32768


@pytest.mark.parametrize("spelling", [{"rope_type": "deepseek_llama_scaling"}, {"apply_yarn_scaling": False}])
def test_deepseek_without_the_softmax_correction(spelling: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
            "mscale_all_dim": 1.0, "rope_theta": 10000.0}  # fmt: skip
    yarn = RopeConfig.from_hf(DEEPSEEK | {"rope_scaling": rope, "rope_parameters": None})
    ours = RopeConfig.from_hf(DEEPSEEK | {"rope_scaling": rope | spelling, "rope_parameters": None})
    assert ours.rope_type == "deepseek_llama_scaling"
    assert (ours.frequencies() == yarn.frequencies()).all()
    assert (ours.attention_factor, ours.table_rows) == (yarn.attention_factor, yarn.table_rows)
    assert (ours.softmax_scale_correction, yarn.softmax_scale_correction > 1.8) == (1.0, True)


def test_yarn_without_its_attention_factor() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "apply_yarn_scaling": False}
    assert RopeConfig.from_keywords(head_dim=64, max_position=4096, **rope).attention_factor == 1.0


# By hand: each time the axis of which the smallest share is used, never one twice in a row; with three, t comes last.
SPREAD = {
    (2, 1): (0, 1, 0),
    (2, 2): (0, 1, 0, 1),
    (2, 2, 2): (0, 1, 2, 1, 2, 0),
    (1, 1, 2): (1, 2, 2, 0),
    (3, 1, 1): (0, 1, 2, 0, 0),
}


@pytest.mark.parametrize("sections", SPREAD)
def test_openpangu_spreads_its_axes(sections: tuple[int, ...]) -> None:
    rope = {"rope_type": "openpangu", "mrope_section": list(sections), "mrope_interleaved": True}
    config = RopeConfig.from_keywords(head_dim=2 * sum(sections), max_position=64, **rope)
    assert (config.layout, config.spread) == ("spread", SPREAD[sections])


@given(st.lists(st.integers(1, 40), min_size=2, max_size=3))
def test_spread_axes_are_counted_and_apart(sections: list[int]) -> None:
    config = RopeConfig.from_keywords(
        head_dim=2 * sum(sections), max_position=64, rope_type="openpangu", mrope_section=sections,
        mrope_interleaved=True,
    )  # fmt: skip
    axes = config.spread or ()
    assert [axes.count(axis) for axis in range(len(sections))] == sections
    assert len(sections) == 2 or axes[-1] == 0
    chosen = axes if len(sections) == 2 else axes[:-1]
    for index, (axis, following) in enumerate(itertools.pairwise(chosen)):
        assert axis != following or set(chosen[index:]) == {axis}


def test_fope_is_refused_by_name() -> None:
    for rope in ({"rope_type": "fope"}, {"rope_type": "default", "use_fope": True}):
        with pytest.raises(ValueError, match="'fope' cannot be computed from a configuration: the coefficients"):
            RopeConfig.from_keywords(head_dim=64, max_position=64, **rope)
    assert RopeConfig.from_keywords(head_dim=64, max_position=64, use_fope=False).rope_type == "default"


def test_patches_of_llama_4() -> None:
    """A row for each patch and one for the class token, as the module of transformers has them."""
    from transformers import Llama4VisionConfig
    from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding, vision_apply_rotary_emb

    config = Llama4VisionConfig(image_size=56, patch_size=14, hidden_size=88 * 2, num_attention_heads=2)
    theirs = Llama4VisionRotaryEmbedding(config)(torch.zeros(1))  # complex [patches + 1, 1, D/2]
    table = get_rope(config)
    assert get_rope(head_dim=88, max_position=16, rope_type="mllama4", style="pairs").config == table.config
    rows = table.cos_sin()
    torch.testing.assert_close(rows, torch.cat((theirs[:, 0].real, theirs[:, 0].imag), dim=-1))
    q, k = torch.randn(2, 17, 2, 88).unbind(0)
    expected = vision_apply_rotary_emb(q[None], k[None], theirs)
    ours = table.apply(q, k, torch.arange(17))
    for actual, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, other[0])


@pytest.mark.parametrize("sections", [(3, 2, 3), (5, 3)])
def test_spread_axes_have_their_own_positions(sections: tuple[int, ...]) -> None:
    table = get_rope(
        head_dim=20, rotary_dim=16, max_position=64, rope_type="openpangu", mrope_section=sections,
        mrope_interleaved=True,
    )  # fmt: skip
    axes, frequencies = table.config.spread, table.config.frequencies()
    assert axes is not None
    positions = torch.randint(0, 64, (len(sections), 9))
    rows = table.lookup(positions)
    for token, pair in itertools.product(range(9), range(8)):
        angle = positions[axes[pair], token].item() * float(frequencies[pair])
        assert rows[token, pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
        assert rows[token, pair + 8].item() == pytest.approx(math.sin(angle), abs=1e-5)
    q, k = torch.randn(9, 2, 20), torch.randn(9, 1, 20)
    by_rows, by_positions = table.apply(q, k, rows), table.apply(q, k, positions)
    for one, other in zip(by_rows, by_positions, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(table.lookup(positions[0]), table.lookup(positions[:1].expand(len(sections), -1)))
