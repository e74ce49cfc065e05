"""Jobs that train and generate: how verl, slime, vime, NeMo-RL, TRL and prime-rl divide their settings.

A job's files configure a trainer and a rollout at once. `parts` gives each side the settings that reach it, under the
names by which the side's own framework knows them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from whorl.doctor.launch import Launch
from whorl.doctor.settings import Setting, make_setting

Side = Literal["trainer", "rollout"]
SIDES: Final[tuple[Side, Side]] = ("trainer", "rollout")
Divided = Iterator[tuple[Side, Setting]]


class Job(NamedTuple):
    """How one framework divides a job.

    names: what it calls both sides; divide: yields every setting with the side that it reaches, twice where it reaches
    both; trainer and rollout: return the framework of each side.
    """

    names: tuple[str, str]
    divide: Callable[[Launch], Divided]
    trainer: Callable[[Launch], str]
    rollout: Callable[[Launch], str]


def parts(launch: Launch) -> tuple[Launch, ...]:
    """Return the launches to check one by one: of a job the trainer and the rollout, else the launch itself."""
    job = JOBS.get(launch.framework)
    if job is None:
        return (launch,)
    settings: dict[Side, list[Setting]] = {"trainer": [], "rollout": []}
    for side, setting in job.divide(launch):
        settings[side].append(setting)
    frameworks = {"trainer": job.trainer(launch), "rollout": job.rollout(launch)}
    return tuple(
        replace(
            launch,
            framework=frameworks[side],
            train=side == "trainer",
            inputs=replace(launch.inputs, settings=settings[side], logs=[]),
            scope=f"{launch.framework} {name}",
        )
        for side, name in zip(SIDES, job.names, strict=True)
    )


def _both(setting: Setting) -> Divided:
    return ((side, setting) for side in SIDES)


def _renamed(setting: Setting, name: str) -> Setting:
    """Return the setting under the name by which the rollout's engine knows it; `path` stays as the user wrote it."""
    return replace(setting, key=make_setting(name, setting.value, setting.kind, setting.where).key)


def _is_shared(setting: Setting) -> bool:
    """Return whether a setting is of the whole environment: a package's version or an environment variable."""
    return setting.kind in ("version", "environment")


# Groups of verl's settings that describe other models than the trained one, with other ranks and lengths.
VERL_OTHER_MODELS: Final = ("critic", "reward_model", "reward", "distillation", "teacher")
VERL_ROLES: Final[dict[str, Side | None]] = {"actor": "trainer", "rollout": "rollout", "ref": None}


def _verl(launch: Launch) -> Divided:
    for setting in launch.inputs.settings:
        groups = setting.path.lstrip("+~").split(".")
        if len(groups) > 1 and (groups[0] in VERL_OTHER_MODELS or any("teacher" in group for group in groups)):
            continue
        if "val_kwargs" in groups:
            continue  # how it samples to evaluate, which trains nothing
        role = next((group for group in groups if group in VERL_ROLES), None)
        side = VERL_ROLES[role] if role else None
        if role is None:
            yield from _both(setting)
        elif side is not None:
            yield side, setting


def _verl_trainer(launch: Launch) -> str:
    settings = [setting for side, setting in _verl(launch) if side == "trainer"]
    is_megatron = any((s.key == "strategy" and s.value == "megatron") or ".megatron." in s.path for s in settings)
    return "bridge" if is_megatron else "hf"


def _verl_rollout(launch: Launch) -> str:
    names = [s.value for side, s in _verl(launch) if side == "rollout" and s.path.endswith("rollout.name")]
    return "sglang" if names and names[-1] == "sglang" else "vllm"


# slime (SGLang) and vime (vLLM) take Megatron's flags, the engine's behind a prefix, and their own.
SLIME_ENGINES: Final = {"slime": "sglang", "vime": "vllm"}
SLIME_ROLLOUT: Final = {
    "rollout_num_gpus_per_engine": "tensor_parallel",
    "rollout_temperature": "temperature",
    "rollout_top_p": "top_p",
    "rollout_top_k": "top_k",
    "rollout_max_context_len": "max_model_len",
}


def _slime(launch: Launch) -> Divided:
    prefix = f"{SLIME_ENGINES[launch.framework]}_"
    for setting in launch.inputs.settings:
        if _is_shared(setting) or setting.key in ("hf_checkpoint", "colocate", "multimodal_keys"):
            yield from _both(setting)
        elif setting.key.startswith(prefix):
            yield "rollout", _renamed(setting, setting.key.removeprefix(prefix))
        elif setting.key in SLIME_ROLLOUT:
            yield "rollout", _renamed(setting, SLIME_ROLLOUT[setting.key])
        else:
            yield "trainer", setting


def _slime_trainer(launch: Launch) -> str:
    if launch.get("train_backend") == "fsdp":
        return "hf"
    return "bridge" if launch.get("megatron_to_hf_mode") == "bridge" else "megatron"


# By name of policy.generation.backend: the group of its settings, and the framework of the doctor.
NEMO_ENGINES: Final = {
    "vllm": ("vllm_cfg vllm_kwargs", "vllm"),
    "sglang": ("sglang_cfg sglang_kwargs", "sglang"),
    "megatron": ("mcore_generation_config", "bridge"),
    "trtllm": ("trtllm_cfg", "hf"),
}


def _nemo(launch: Launch) -> Divided:
    engine = NEMO_ENGINES.get(_nemo_backend(launch), NEMO_ENGINES["vllm"])[0].split()
    unused = _NEMO_ENGINE_GROUPS.difference(engine)
    unused |= {"dtensor_cfg" if _nemo_trainer(launch) == "bridge" else "megatron_cfg"}
    for setting in launch.inputs.settings:
        groups = setting.path.lstrip("+~").split(".")
        if _is_shared(setting) or setting.kind == "set" or groups == ["policy", "model_name"]:
            yield from _both(setting)
        elif unused.intersection(groups):
            continue
        elif groups[:2] == ["policy", "generation"]:
            yield "rollout", setting
        elif groups[:2] == ["policy", "hf_config_overrides"]:
            yield "trainer", setting
            yield "rollout", _renamed(setting, "hf_overrides") if len(groups) == 2 else setting
        elif groups[0] in ("policy", "grpo", "ppo", "loss_fn"):
            yield "trainer", setting


_NEMO_ENGINE_GROUPS: Final = {group for groups, _ in NEMO_ENGINES.values() for group in groups.split()}


def _nemo_value(launch: Launch, path: str) -> object:
    values = [s.value for s in launch.inputs.settings if s.path.lstrip("+~") == path]
    return values[-1] if values else None


def _nemo_backend(launch: Launch) -> str:
    return str(_nemo_value(launch, "policy.generation.backend") or "vllm")


def _nemo_trainer(launch: Launch) -> str:
    return "bridge" if _nemo_value(launch, "policy.megatron_cfg.enabled") is True else "hf"


def _nemo_rollout(launch: Launch) -> str:
    return NEMO_ENGINES.get(_nemo_backend(launch), NEMO_ENGINES["vllm"])[1]


# Settings of sampling, which TRL's trainer sends with every request.
SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _trl(launch: Launch) -> Divided:
    for setting in launch.inputs.settings:
        if _is_shared(setting) or setting.key in (*SAMPLING, "vllm_mode", "model_name_or_path"):
            yield from _both(setting)
        elif setting.key.startswith("vllm_importance_sampling") or not setting.key.startswith("vllm_"):
            yield "trainer", setting
        else:
            yield "rollout", _renamed(setting, setting.key.removeprefix("vllm_"))


def _prime(launch: Launch) -> Divided:
    for setting in launch.inputs.settings:
        groups = setting.path.split(".")
        if groups[0] == "trainer":
            yield "trainer", setting
        elif groups[0] == "inference" or groups[:3] == ["orchestrator", "train", "sampling"]:
            yield "rollout", setting
        elif groups[0] != "orchestrator":
            yield from _both(setting)


def _always(framework: str) -> Callable[[Launch], str]:
    return lambda launch: framework


JOBS: Final[dict[str, Job]] = {
    "verl": Job(("actor", "rollout"), _verl, _verl_trainer, _verl_rollout),
    "slime": Job(("trainer", "rollout"), _slime, _slime_trainer, _always("sglang")),
    "vime": Job(("trainer", "rollout"), _slime, _slime_trainer, _always("vllm")),
    "nemo-rl": Job(("policy", "generation"), _nemo, _nemo_trainer, _nemo_rollout),
    "trl": Job(("trainer", "rollout"), _trl, _always("hf"), _always("vllm")),
    "prime-rl": Job(("trainer", "inference"), _prime, _always("hf"), _always("vllm")),
}
