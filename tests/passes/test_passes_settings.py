"""vLLM's settings: their names, their order of resolution, what is refused."""

import json
from typing import Any

import pytest

from whorl.passes import settings
from whorl.passes.config import SequenceParallel
from whorl.passes.settings import resolve

ON = {"pass_config": {"enable_sp": True}}


def test_off_by_default() -> None:
    assert resolve({}, device="npu") is None
    assert resolve({"pass_config": {"enable_sp": None}}, device="npu") is None
    assert resolve({"pass_config": {"enable_sp": False, "sp_min_token_num": 5}}, device="npu") is None
    assert resolve({"sp_min_token_num": 5}, device="npu") is None, "a threshold alone switches nothing on"


@pytest.mark.parametrize(("is_moe", "expected"), [(False, 1000), (True, 1)])
def test_ascend_has_a_default_threshold(is_moe: bool, expected: int) -> None:
    actual = resolve(ON, device="npu", is_moe=is_moe)
    assert actual == SequenceParallel(min_tokens=expected)


def test_what_is_said_goes_before_the_platform() -> None:
    said = {"pass_config": {"enable_sp": True, "sp_min_token_num": 512}}
    for device in ("npu", "cuda", "cpu"):
        assert resolve(said, device=device) == SequenceParallel(min_tokens=512)
    assert resolve(json.dumps(said), device="npu", is_moe=True) == SequenceParallel(min_tokens=512)


def test_the_pass_config_goes_before_what_stands_beside_it() -> None:
    both = {"enable_sp": False, "sp_min_token_num": 5, "pass_config": {"enable_sp": True, "sp_min_token_num": 7}}
    assert resolve(both, device="cpu") == SequenceParallel(min_tokens=7)


def test_without_a_threshold_it_goes_off_loudly() -> None:
    with pytest.warns(RuntimeWarning, match="sp_min_token_num is not set and cuda has no default: enable_sp becomes"):
        assert resolve(ON, device="cuda") is None


def test_a_model_that_is_not_captured_is_refused() -> None:
    eager: list[dict[str, Any]] = [{"mode": 0}, {"level": 0}, {"mode": "NONE"}, {"enforce_eager": True}]
    for more in eager:
        with pytest.raises(ValueError, match="enable_sp: the model is not captured"):
            resolve(ON | more, device="npu")
        assert resolve(more, device="npu") is None, "off is off, captured or not"


@pytest.mark.parametrize("name", ["compile_ranges_endpoints", "compile_ranges_split_points"])
def test_compile_ranges_change_nothing(name: str) -> None:
    assert resolve(ON | {name: [2048, 256]}, device="npu") == SequenceParallel(min_tokens=1000)


def test_a_threshold_above_the_longest_step_is_cut() -> None:
    assert resolve(ON, device="npu", max_tokens=600) == SequenceParallel(min_tokens=600)
    assert resolve(ON, device="npu", max_tokens=8192) == SequenceParallel(min_tokens=1000)


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{enable_sp}", "compilation config: not JSON"),
    "a list": ("[1]", "expected an object"),
    "enable_sp": ({"enable_sp": "yes"}, "enable_sp is 'yes', expected true, false or null"),
    "threshold": (ON | {"sp_min_token_num": 0}, "sp_min_token_num is 0, expected a count"),
    "true threshold": ({"sp_min_token_num": True}, "sp_min_token_num is True"),
    "endpoints": ({"compile_ranges_endpoints": [0]}, r"compile_ranges_endpoints is \[0\], expected counts"),
    "two names": (
        {"compile_ranges_endpoints": [8], "compile_ranges_split_points": [9]},
        r"compile_ranges_endpoints is \[8\] and compile_ranges_split_points, its older name, is \[9\]; give only one",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        resolve(settings, device="npu")


def test_what_is_not_read_is_said() -> None:
    with pytest.warns(RuntimeWarning, match="not read: fuse_norm_quant"):
        resolve({"pass_config": {"fuse_norm_quant": True}}, device="npu")


def test_the_numbers_are_the_vendors() -> None:
    assert settings.DEFAULT_MIN_TOKENS == {"npu": (1000, 1)}
