"""Every family of transformers that has a rotary module, rotated by its own code and by ours.

A family agrees, or reading its configuration says that it is not known, or refuses it with a reason: none is taken for
Llama in silence.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import transformers.models
from rope_models import HUNYUAN_VL
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from whorl.rope_config import RopeConfig, UnknownFamilyWarning
from whorl.rope_config.families import MODELS
from whorl.rope_table import get_rope

TOKENS = 7
POSITIONS = 40  # and as long a table: whole ones of all families stay in memory, 6 GB of them
# Default configurations that their own model cannot run, completed as published files complete them.
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
QUARTER = {**HALF, "partial_rotary_factor": 0.25}
COMPLETED: dict[str, dict[str, Any]] = {
    "glm4v_text": {"rope_parameters": SECTIONS},
    "glm_image_text": {"rope_parameters": SECTIONS},
    "glm4v_moe_text": {"rope_parameters": SECTIONS, "head_dim": 128},
    "glm4_moe": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "minimax_m3_vl_text": {"rope_parameters": HALF},
    "qwen4_exp_text": {"rope_parameters": QUARTER},
    "hunyuan_vl_text": HUNYUAN_VL["text_config"],
}
# Annotated with the text model's configuration, built with those of the speech parts, which are unknown here.
SPEECH = {"Qwen3OmniMoeRotaryEmbedding"}
# transformers turns the two channels of a pair by different axes (see test_rope_table.py): compared on text alone,
# where all axes are equal.
ON_TEXT = {"hunyuan_vl_text"}
# Known families that no module of transformers rotates: remote code, and functions of sin and cos alone.
ELSEWHERE = {"chatglm", "kimi_k2", "ernie4_5_moe_vl", "gptj", "codegen"}
# What a text model's reader may say no to: these hold no length, or no sizes under the usual names.
NO_TEXT = {
    "bailing_hybrid",
    "dbrx",
    "efficientloftr",
    "eomt_dinov3",
    "mlcd_vision_model",
    "moonshine",
    "recurrent_gemma",
}
NO_TEXT |= {"sam3_vit_model", ""}


class Family(NamedTuple):
    module: ModuleType
    rotary: type
    config_class: Any

    @property
    def name(self) -> str:
        return f"{self.module.__name__.rsplit('.', 1)[1]}.{self.rotary.__name__}"

    def config(self) -> Any:
        """The text model's configuration, by default or completed."""
        config = self.config_class()
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        completed = COMPLETED.get(config.model_type)
        return type(config)(**completed) if completed else config


def families() -> Iterator[Family]:
    root = Path(transformers.models.__path__[0])
    for name in sorted(module.name for module in pkgutil.iter_modules([str(root)])):
        source = root / name / f"modeling_{name}.py"
        if not source.exists() or "RotaryEmbedding" not in source.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for kind in list(vars(module).values()):
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            config_class = _config_class(kind, module)
            is_text = "Vision" not in kind.__name__ and kind.__name__ not in SPEECH
            if kind.__name__.endswith("RotaryEmbedding") and is_text and config_class:
                yield Family(module, kind, config_class)


def _config_class(rotary: type, module: ModuleType) -> Any:
    for parameter in inspect.signature(rotary.__init__).parameters.values():
        kind = parameter.annotation
        kind = getattr(module, kind, None) if isinstance(kind, str) else kind
        if inspect.isclass(kind) and hasattr(kind, "model_type"):
            return kind
    return None


def layer_types(rotary: torch.nn.Module) -> list[str | None]:
    names = [name for name, _ in rotary.named_buffers() if name.endswith("_inv_freq") and "original" not in name]
    return [name.removesuffix("_inv_freq") for name in names] or [None]


def their_function(module: ModuleType, config: Any) -> Callable[..., Any] | None:
    interleaves = getattr(config, "rope_interleave", True) is not False
    names = ["apply_rotary_pos_emb_interleave"] * interleaves + ["apply_rotary_pos_emb", "apply_rotary_emb"]
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def theirs(family: Family, rotary: Any, config: Any, layer: str | None, q: Tensor, positions: Tensor) -> Tensor:
    """q [T, H, R] rotated by transformers."""
    function = their_function(family.module, config)
    assert function is not None, "no function that rotates"
    x = q.transpose(0, 1)[None]
    out = rotary(x, positions, layer) if layer else rotary(x, positions)
    if not isinstance(out, tuple):  # complex numbers; Llama-4 has tokens before heads
        if family.module.__name__.endswith("llama4"):
            return function(q[None], q[None], out)[0][0]
        return function(x, x, out)[0][0].transpose(0, 1)
    takes_one = next(iter(inspect.signature(function).parameters)) == "x"
    rotated = function(x, *out) if takes_one else function(x, x, *out)[0]
    return rotated[0].transpose(0, 1)


def ours(config: RopeConfig, q: Tensor, positions: Tensor) -> Tensor:
    """The rotating channels alone: where they stand in a head is the model's own slicing."""
    table = get_rope(dataclasses.replace(config, head_dim=config.rotary_dim, where="leading"), rows=POSITIONS)
    return table.apply(q, q, table.lookup(positions))[0]


def difference(family: Family, layer: str | None, config: Any, rotary: Any, rope: RopeConfig) -> float:
    assert hasattr(rotary, "mrope_section") == rope.is_mrope, "one of us gives positions several axes"
    q = torch.randn(TOKENS, 2, rope.rotary_dim)
    positions = torch.randint(0, POSITIONS, (len(rope.sections) if rope.sections else 1, TOKENS))
    if config.model_type in ON_TEXT:
        positions[:] = positions[:1].clone()
    axes = positions[:, None] if rope.is_mrope else positions
    got = ours(rope, q, positions if rope.is_mrope else positions[0])
    return float((got - theirs(family, rotary, config, layer, q, axes)).abs().max())


def without_rope(config: Any) -> dict[str, Any]:
    """A file that leaves base and share to the model's defaults."""
    left_out = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


def read(config: Any, layer: str | None) -> tuple[RopeConfig, bool]:
    """(what we read, whether it said that the family is unknown)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rope = RopeConfig.from_hf(config, layer_type=layer)
    return rope, any(issubclass(warning.category, UnknownFamilyWarning) for warning in caught)


def judge(family: Family) -> Iterator[tuple[str, str]]:
    """(model type, "agrees" | "warns" | what is wrong) for each layer type of a family."""
    try:
        config = family.config()
        rotary = family.rotary(config)
    except (AttributeError, KeyError, TypeError):  # its own default configuration is not enough for it
        name = family.config_class.model_type
        known = name.removesuffix("_text") in MODELS
        yield name, "known, and cannot be checked" if known else "warns"
        return
    for layer in layer_types(rotary):
        name = config.model_type
        try:
            rope, is_unknown = read(config, layer)
        except ValueError as error:
            yield name, "refused" if name in NO_TEXT or "layer_type" in str(error) else f"refused: {error}"
            continue
        if is_unknown:
            yield name, "warns"
            continue
        if their_function(family.module, config) is None:
            continue  # musicflamingo: a Qwen2 whose sound has a rotation of its own
        try:
            distance = difference(family, layer, config, rotary, rope)
        except (AssertionError, RuntimeError, TypeError) as error:
            yield name, f"{family.name}, layers {layer}, cannot be compared: {error}"
            continue
        yield name, "agrees" if distance < 1e-4 else f"{family.name}, layers {layer}: off by {distance:.3g}"
        yield name, _judge_defaults(config, layer, rope)
        yield name, _judge_softmax_scale(family, name)


def _judge_defaults(config: Any, layer: str | None, rope: RopeConfig) -> str:
    if config.model_type in COMPLETED:
        return "agrees"
    try:
        bare, _ = read(without_rope(config), layer)
    except ValueError:
        return "agrees"  # loud
    same = (bare.base, bare.rotary_dim, bare.sections) == (rope.base, rope.rotary_dim, rope.sections)
    return "agrees" if same else f"a file without rope parameters: {bare} instead of {rope}"


def _judge_softmax_scale(family: Family, name: str) -> str:
    corrects = "mscale_all_dim" in inspect.getsource(family.module)
    ours = MODELS.get(name.removesuffix("_text"))
    return "agrees" if corrects == bool(ours and ours.deepseek_yarn) else f"corrects the softmax scale: {corrects}"


@pytest.mark.slow
def test_no_family_is_taken_for_llama_in_silence() -> None:
    judged: dict[str, set[str]] = {}
    for family in families():
        for name, verdict in judge(family):
            judged.setdefault(name.removesuffix("_text"), set()).add(verdict)
    wrong = {name: outcomes - {"agrees", "warns", "refused"} for name, outcomes in judged.items()}
    assert {name: outcomes for name, outcomes in wrong.items() if outcomes} == {}
    agreed = {name for name, outcomes in judged.items() if "agrees" in outcomes}
    assert len(agreed) > 120, "the sweep found few families: has transformers moved its modules?"
    in_transformers = {name.removesuffix("_text") for name in CONFIG_MAPPING}
    unproven = (MODELS.keys() & in_transformers) - agreed - ELSEWHERE - NO_TEXT
    assert unproven == set(), "families listed as known that nothing here compared"


@pytest.mark.parametrize("name", ["nanochat", "cosmos3_edge_text", "openai_privacy_filter", "moonshine_streaming"])
def test_families_that_were_taken_for_llama(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    chosen = [family for family in families() if family.config_class.model_type == name]
    for family in chosen:
        verdicts = dict(judge(family))
        assert set(verdicts.values()) == {"agrees"}, verdicts
    assert chosen


def test_an_unknown_family_is_named() -> None:
    values = {"model_type": "spiral", "head_dim": 64, "max_position_embeddings": 128}
    with pytest.warns(UnknownFamilyWarning, match="model_type 'spiral' is unknown"):
        RopeConfig.from_hf(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RopeConfig.from_hf({**values, "model_type": "llama"})
        RopeConfig.from_hf({**values, "model_type": None})


def test_defaults_that_are_not_held_must_be_given() -> None:
    values = {"model_type": "gemma4_text", "head_dim": 256, "max_position_embeddings": 128}
    with pytest.raises(ValueError, match=r"frequencies of 'gemma4_text' are not known; .* needs rope_parameters"):
        RopeConfig.from_hf(values, layer_type="full_attention")


def test_direction() -> None:
    config = RopeConfig.from_keywords(head_dim=8, max_position=16)
    back = dataclasses.replace(config, direction=-1)
    q = torch.randn(5, 2, 8)
    there = ours(config, q, torch.arange(5))
    torch.testing.assert_close(ours(back, there, torch.arange(5)), q)
    with pytest.raises(ValueError, match="direction must be 1 or -1, found 2"):
        dataclasses.replace(config, direction=2)
