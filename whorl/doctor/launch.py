"""`Launch`: one launch as the checks see it: framework, device, model facts, and settings with their precedence."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from whorl.doctor.inputs import OTHER_TOWERS, Inputs
from whorl.doctor.settings import Setting
from whorl.rope_config import RopeConfig

FRAMEWORKS: Final = ("megatron", "bridge", "mindspeed", "mindspeed-mm", "verl", "vllm", "hf", "torchtitan", "whorl")
MEGATRON_FAMILY: Final = ("megatron", "bridge", "mindspeed")
TRAINING: Final = (*MEGATRON_FAMILY, "mindspeed-mm", "torchtitan")
DEVICES: Final = ("cuda", "npu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One framework's view of the inputs. verl has two: see `parts`."""

    framework: str
    framework_because: str
    device: str
    device_because: str
    train: bool
    inputs: Inputs
    text: Mapping[str, Any] | None
    rope: RopeConfig | None
    rope_problem: str | None
    rope_warnings: tuple[str, ...] = ()
    unknown_family: str | None = None
    scope: str = ""

    def find(self, key: str) -> Setting | None:
        """The setting that takes effect. Megatron's model reads its config before its arguments; others the reverse."""
        order = ("argument", "config") if self.framework in MEGATRON_FAMILY else ("config", "argument")
        for kind in ("set", *reversed(order)):
            found = [s for s in self.all(key) if s.kind == kind]
            if found:
                return found[-1]
        return None

    def all(self, key: str) -> list[Setting]:
        """Every place that sets `key`, in reading order."""
        return [s for s in self.inputs.settings if s.key == key and s.kind not in ("version", "environment")]

    def get(self, key: str, default: Any = None) -> Any:
        setting = self.find(key)
        return default if setting is None else setting.value

    def on(self, key: str) -> bool:
        return self.get(key) is True

    def number(self, key: str) -> int | None:
        """A whole number, or None where it is not set or still holds a shell variable."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def real(self, key: str) -> float | None:
        """A number, also where YAML kept it as text (1e6); None where it is not set or not a number."""
        try:
            return float(self.get(key))
        except (TypeError, ValueError):
            return None

    def where(self, key: str) -> str:
        """Where `key` is set, as the user wrote it."""
        setting = self.find(key)
        return "not set" if setting is None else f"{setting.where} ({setting.path})"

    def removal(self, key: str) -> str:
        """How to be rid of a switch, in the words of whoever set it: a path of Hydra's or YAML's, or a flag."""
        setting = self.find(key)
        if setting is not None and "." in setting.path:
            return f"remove {setting.path}"
        return f"remove --{key.replace('_', '-')}"

    def environment(self, name: str) -> Setting | None:
        found = [s for s in self.inputs.settings if s.kind == "environment" and s.key == name]
        return found[-1] if found else None

    def package(self, name: str) -> Setting | None:
        """What names a package and its version."""
        found = [s for s in self.inputs.settings if s.key == name and s.kind != "environment"]
        return found[-1] if found else None

    def version(self, package: str) -> tuple[int, ...] | None:
        """A package's version as numbers, from a requirements file, the settings or --set; None if unknown."""
        setting = self.package(package)
        numbers = re.search(r"\d+(\.\d+)*", str(setting.value)) if setting else None
        return tuple(int(part) for part in numbers.group().split(".")) if numbers else None

    def has(self, package: str) -> bool | None:
        """Whether a package is in use; None where nothing lists the packages."""
        if self.package(package) is not None:
            return True
        return False if any(s.kind == "version" for s in self.inputs.settings) else None

    @property
    def sections(self) -> tuple[int, ...] | None:
        """The MRoPE sections in effect: the launch's where it sets them, else the model's."""
        return as_sections(self.get("mrope_section")) or self.model_sections

    @property
    def model_sections(self) -> tuple[int, ...] | None:
        """The sections of config.json, or those its model_type implies."""
        written = rope_entries(self.text).get("mrope_section")
        return as_sections(written) or (self.rope.sections if self.rope else None)

    @property
    def is_mrope(self) -> bool:
        return self.model_sections is not None

    @property
    def style(self) -> str:
        return self.rope.style if self.rope else "pairs" if self.on("rotary_interleaved") else "half"

    @property
    def layout(self) -> str | None:
        return self.rope.layout if self.rope else None

    @property
    def is_mla(self) -> bool:
        return self.on("multi_latent_attention") or bool(self.text and self.text.get("kv_lora_rank"))

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
        """MindSpeed-LLM has rotary flags of its own, and multi-latent attention reads them, not Megatron's."""
        if not self.uses_mindspeed:
            return False
        own = ("rope_scaling_type", "rope_scaling_mscale", "rope_scaling_mscale_all_dim")
        named = str(self.get("spec")).startswith("mindspeed_llm.") or self.get("tokenizer_type") == "PretrainedFromHF"
        return named or bool(self.has("mindspeed_llm")) or any(self.find(key) is not None for key in own)

    def parts(self) -> tuple["Launch", ...]:
        """What runs on its own: for verl the actor and the rollout, else the launch itself."""
        if self.framework != "verl":
            return (self,)
        actor = self._part("actor", "hf", train=True)
        settings = actor.inputs.settings
        if actor.get("strategy") == "megatron" or any(".megatron." in s.path for s in settings):
            actor = replace(actor, framework="bridge")
        return (actor, self._part("rollout", "vllm", train=False))

    def _part(self, scope: str, framework: str, *, train: bool) -> "Launch":
        mine = [s for s in self.inputs.settings if not _of_another_role(s.path, scope)]
        inputs = Inputs(model=self.inputs.model, model_where=self.inputs.model_where, settings=mine)
        return replace(self, framework=framework, train=train, inputs=inputs, scope=f"verl {scope}")


def text_config(model: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of a model config that describes the language model, over what stands around it."""
    if model is None:
        return None
    for name in ("thinker_config", "text_config", "llm_config", "language_config"):
        if isinstance(model.get(name), Mapping):
            outer = {key: value for key, value in model.items() if key != name and key not in OTHER_TOWERS}
            return {**outer, **(text_config(model[name]) or {})}
    return dict(model)


def rope_entries(text: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The config's own rope dictionary, whichever of the two spellings it uses."""
    entries = (text or {}).get("rope_parameters") or (text or {}).get("rope_scaling")
    return entries if isinstance(entries, Mapping) else {}


def as_sections(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers as a tuple; None for anything else."""
    whole = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, int) for item in value)
    return tuple(value) if whole else None


# Groups of verl's settings that describe other models than the one trained: their ranks and lengths are their own.
VERL_OTHER_MODELS: Final = ("critic", "reward_model", "reward", "distillation", "teacher")
VERL_ROLES: Final = ("actor", "rollout", "ref")


def _of_another_role(path: str, scope: str) -> bool:
    parts = path.lstrip("+~").split(".")
    if len(parts) > 1 and (parts[0] in VERL_OTHER_MODELS or any("teacher" in part for part in parts)):
        return True
    roles = [part for part in parts if part in VERL_ROLES]
    return bool(roles) and roles[0] != scope
