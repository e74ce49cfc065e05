"""`Launch` is what the checks read: framework, device, the model's config, and settings with their precedence."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from whorl.doctor.inputs import OTHER_TOWERS, Inputs
from whorl.doctor.settings import Setting
from whorl.rope_config import UNCOMPUTABLE, RopeConfig
from whorl.rope_config.hugging_face import TEXT_KEYS

ENGINES: Final = ("vllm", "sglang", "whorl")  # serve a model
JOB_FRAMEWORKS: Final = ("verl", "slime", "vime", "nemo-rl", "trl", "prime-rl")  # train and generate: see jobs.py
FRAMEWORKS: Final = ("megatron", "bridge", "mindspeed", "mindspeed-mm", "hf", "torchtitan", *ENGINES, *JOB_FRAMEWORKS)
MEGATRON_FAMILY: Final = ("megatron", "bridge", "mindspeed")
TRAINING: Final = (*MEGATRON_FAMILY, "mindspeed-mm", "torchtitan")
DEVICES: Final = ("cuda", "npu")
EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")  # keys of config.json, of one meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launch of one framework. A job, such as verl's, has two parts, a trainer and a rollout: see jobs.py.

    framework_because and device_because: why these values hold, for the report; text: the language model's config, with
    --hf-overrides merged in; rope: its RopeConfig, None where it cannot be read; rope_problem: why RopeConfig refused
    the config as it is written (`rope` is then that of a reduced config, see `build_launch`); rope_changed_by: the flag
    that changed the rope dictionary of config.json, such as --hf-overrides; rope_warnings and unknown_family: the
    warnings of RopeConfig; scope: the job and its part, such as "verl actor", otherwise empty.
    """

    framework: str
    framework_because: str
    device: str
    device_because: str
    train: bool
    inputs: Inputs
    text: Mapping[str, Any] | None
    rope: RopeConfig | None
    rope_problem: str | None
    rope_changed_by: Setting | None = None
    rope_warnings: tuple[str, ...] = ()
    unknown_family: str | None = None
    scope: str = ""

    def find(self, key: str) -> Setting | None:
        """Return the setting of `key` that takes effect, or None.

        --set overrides all others. Megatron's model prefers its config to its arguments, other frameworks prefer their
        arguments. Of several settings of the same kind the last one wins.
        """
        weakest_first = ("argument", "config") if self.framework in MEGATRON_FAMILY else ("config", "argument")
        for kind in ("set", *reversed(weakest_first)):
            settings = [s for s in self.find_all(key) if s.kind == kind]
            if settings:
                return settings[-1]
        return None

    def find_all(self, key: str) -> list[Setting]:
        """Return every setting of `key`, in reading order, without package versions and environment variables."""
        return [s for s in self.inputs.settings if s.key == key and s.kind not in ("version", "environment")]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` that takes effect, or `default`."""
        setting = self.find(key)
        return default if setting is None else setting.value

    def on(self, key: str) -> bool:
        """Return whether the switch `key` is set to true."""
        return self.get(key) is True

    def number(self, key: str) -> int | None:
        """Return the value as an int; None where it is not set or is not one (an unresolved shell variable)."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def real(self, key: str) -> float | None:
        """Return the value as a float, also where YAML keeps it as text (1e6); None where it is not a number."""
        try:
            return float(self.get(key))
        except (TypeError, ValueError):
            return None

    def where(self, key: str) -> str:
        """Return the file, line and path that set `key`, as the user wrote them."""
        setting = self.find(key)
        return "not set" if setting is None else f"{setting.where} ({setting.path})"

    def removal(self, key: str) -> str:
        """Return the instruction that removes a switch, spelt as it was set: a Hydra or YAML path, or a flag."""
        setting = self.find(key)
        if setting is not None and "." in setting.path:
            return f"remove {setting.path}"
        return f"remove --{key.replace('_', '-')}"

    def environment(self, name: str) -> Setting | None:
        """Return the setting of an environment variable, or None."""
        settings = [s for s in self.inputs.settings if s.kind == "environment" and s.key == name]
        return settings[-1] if settings else None

    def package(self, name: str) -> Setting | None:
        """Return the setting that names a package and its version, or None."""
        settings = [s for s in self.inputs.settings if s.key == name and s.kind != "environment"]
        return settings[-1] if settings else None

    def version(self, package: str) -> tuple[int, ...] | None:
        """Return a package's version as numbers, from a requirements file, the settings or --set; None if unknown."""
        setting = self.package(package)
        numbers = re.search(r"\d+(\.\d+)*", str(setting.value)) if setting else None
        return tuple(int(part) for part in numbers.group().split(".")) if numbers else None

    def has(self, package: str) -> bool | None:
        """Return whether a package is installed; None where no file lists the packages."""
        if self.package(package) is not None:
            return True
        return False if any(s.kind == "version" for s in self.inputs.settings) else None

    @property
    def sections(self) -> tuple[int, ...] | None:
        """The MRoPE sections in effect: the launch's where it sets them, else the model's."""
        return as_sections(self.get("mrope_section")) or self.model_sections

    @property
    def model_sections(self) -> tuple[int, ...] | None:
        """The sections of config.json, or those that its model_type implies; without config.json the launch's."""
        if self.text is None:
            return as_sections(self.get("mrope_section"))
        if self.dropped_sections is not None:
            return None
        written = rope_entries(self.text).get("mrope_section")
        return as_sections(written) or (self.rope.sections if self.rope else None)

    @property
    def dropped_sections(self) -> tuple[int, ...] | None:
        """The sections of config.json that an override of vLLM's left out; None where it left out none."""
        if self.framework != "vllm" or self.rope_changed_by is None or rope_entries(self.text).get("mrope_section"):
            return None
        return as_sections(rope_entries(text_config(self.inputs.model)).get("mrope_section"))

    @property
    def rope_where(self) -> str:
        """The place of the rope dictionary: config.json, or the flag that changed it."""
        setting = self.rope_changed_by
        return self.inputs.model_where if setting is None else f"{setting.where} ({setting.path})"

    @property
    def is_mrope(self) -> bool:
        return self.model_sections is not None

    @property
    def is_text_only(self) -> bool:
        """Whether the architecture in config.json takes no pictures, whatever sections its rope dictionary has."""
        names = (self.inputs.model or {}).get("architectures") or []
        return bool(names) and not any("ConditionalGeneration" in str(name) for name in names)

    @property
    def uncomputable(self) -> str | None:
        """The rope type where no configuration suffices for its frequencies (fope), else None."""
        entries = rope_entries(self.text)
        kind = "fope" if entries.get("use_fope") else str(entries.get("rope_type") or entries.get("type"))
        return kind if kind in UNCOMPUTABLE else None

    @property
    def style(self) -> str:
        """Which two channels form a rotary pair: "half" (i and i + R/2) or "pairs" (2i and 2i + 1)."""
        return self.rope.style if self.rope else "pairs" if self.on("rotary_interleaved") else "half"

    @property
    def layout(self) -> str | None:
        """How the MRoPE sections are assigned to channels (chunked, interleaved or hwt); None for plain RoPE."""
        return self.rope.layout if self.rope else None

    @property
    def is_mla(self) -> bool:
        return self.on("multi_latent_attention") or bool(self.text and self.text.get("kv_lora_rank"))

    @property
    def branch_and_reason(self) -> tuple[str, str]:
        """Megatron's position_embedding_type, and why it has that value."""
        setting = self.find("position_embedding_type")
        if setting is not None:
            return str(setting.value), f"position_embedding_type={setting.value} in {setting.where}"
        if self.on("use_rotary_position_embeddings"):
            return "rope", f"use_rotary_position_embeddings in {self.where('use_rotary_position_embeddings')}"
        if self.uses_bridge and (self.text or {}).get("model_type") == "gpt_oss":
            return "yarn", "Bridge's provider of gpt-oss sets it"
        if self.uses_bridge and self.is_mrope and self.is_text_only:
            return "rope", "Bridge's provider of a text model sets it"
        branch = "mrope" if self.is_mrope else "rope"
        return branch, f"position_embedding_type is not set; assumed to be {branch}, which the model needs"

    @property
    def branch(self) -> str:
        return self.branch_and_reason[0]

    @property
    def on_ascend(self) -> bool:
        """Whether vllm-ascend runs."""
        return self.framework == "vllm" and self.device == "npu"

    @property
    def uses_megatron(self) -> bool:
        return self.framework in MEGATRON_FAMILY

    @property
    def uses_bridge(self) -> bool:
        return self.framework == "bridge" or bool(self.has("megatron_bridge"))

    @property
    def uses_mindspeed(self) -> bool:
        named = self.framework == "mindspeed" or bool(self.has("mindspeed"))
        return named or self.find("use_fused_rotary_pos_emb") is not None

    @property
    def uses_mindspeed_llm(self) -> bool:
        """Whether MindSpeed-LLM runs. It has its own rotary flags, and its MLA reads them instead of Megatron's."""
        if not self.uses_mindspeed:
            return False
        llm_flags = ("rope_scaling_type", "rope_scaling_mscale", "rope_scaling_mscale_all_dim")
        named = str(self.get("spec")).startswith("mindspeed_llm.") or self.get("tokenizer_type") == "PretrainedFromHF"
        return named or bool(self.has("mindspeed_llm")) or any(self.find(key) is not None for key in llm_flags)


def text_config(model: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the config of the language model, with the keys of the outer config where it has none of its own."""
    if model is None:
        return None
    for name in TEXT_KEYS:
        if isinstance(model.get(name), Mapping):
            outer = {key: value for key, value in model.items() if key != name and key not in OTHER_TOWERS}
            return {**outer, **(text_config(model[name]) or {})}
    return dict(model)


def rope_entries(text: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the config's rope dictionary: rope_parameters, or rope_scaling in older configs."""
    entries = (text or {}).get("rope_parameters") or (text or {}).get("rope_scaling")
    return entries if isinstance(entries, Mapping) else {}


def dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version or ()))


def as_sections(value: Any) -> tuple[int, ...] | None:
    """Return a list of ints as a tuple; None for anything else."""
    is_ints = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, int) for item in value)
    return tuple(value) if is_ints else None
