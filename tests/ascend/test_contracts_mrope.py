"""MRoPE sections in the vendor contracts: which axis a channel follows, here, at the vendor and in transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whorl import contracts

SECTIONS = [[24, 20, 20], [11, 11, 10], [16, 24, 24], [8, 12, 12], [22, 22, 20], [24, 22, 18]]


@pytest.mark.parametrize("sections", SECTIONS)
def test_interleaved_axes_are_transformers(sections: list[int]) -> None:
    """With positions t=0, h=1, w=2 the sine of each channel tells which axis transformers gave it."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    half = sum(sections)
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = Qwen3VLTextConfig(head_dim=2 * half, rope_parameters=parameters)
    rotary = Qwen3VLTextRotaryEmbedding(config)
    _, sin = rotary(torch.zeros(1), torch.arange(3).view(3, 1, 1))
    choices = (torch.arange(3.0)[:, None] * rotary.inv_freq).sin()
    axes = (choices - sin[0, 0, :half]).abs().argmin(0)
    assert contracts.interleaved_axes(sections) == tuple(axes.tolist())


@pytest.mark.parametrize("sections", SECTIONS)
def test_where_the_formulas_differ(sections: list[int]) -> None:
    assert contracts.interleaved_formulas_differ(sections) == (sections in ([22, 22, 20], [24, 22, 18]))


@given(st.tuples(*[st.integers(0, 40)] * 3))
def test_vendor_sections_give_the_vendors_channels(sections: tuple[int, int, int]) -> None:
    rewritten = contracts.vendor_sections(sections)
    assert contracts.interleaved_axes(rewritten) == contracts.interleaved_axes(sections, "vendor")
    assert contracts.interleaved_range_reason(rewritten) is None


@given(st.tuples(*[st.integers(0, 40)] * 3))
def test_range_reason_is_whether_sections_are_honoured(sections: tuple[int, int, int]) -> None:
    axes = contracts.interleaved_axes(sections)
    honoured = (axes.count(1), axes.count(2)) == (sections[1], sections[2])
    assert (contracts.interleaved_range_reason(sections) is None) == honoured


def test_range_reason_says_what_is_missing() -> None:
    assert contracts.interleaved_range_reason([16, 24, 24]) == "h=24 needs channel 70, there are 64"
    assert "3 sections" in str(contracts.interleaved_range_reason([16, 16, 16, 16]))
