"""Load weights from disk to the device: one tensor at a time, only this rank's shard, with every tensor accounted for.

`load_model` takes a folder of safetensors, a trainer's checkpoint, a GGUF file, a Hugging Face id, or None for the
small default model. No code from a checkpoint is ever run; the only pickle that is read is a trainer's index, as data.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whorl import models
from whorl.checkpoint_index import METADATA
from whorl.device import HOST, accelerator, default_device, numbered
from whorl.host_memory import free_memory
from whorl.nn import ONE, Matrix, Model, Ranks, create_parameters, weighted
from whorl.nn import weights as formats
from whorl.ops.cpu import library as cpu_library

from .. import memory
from ..settings import LoadOptions
from . import dcp
from .checkpoint import Checkpoint, read_config
from .checkpoint import Source as Source
from .fill import check_fit, fill
from .hub import resolve
from .made import make
from .quantize import quantized
from .safetensors import open_safetensors

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path_or_id: str | Path | None = None,
    options: LoadOptions | None = None,
    *,
    device: str | torch.device | None = None,
    tp: Ranks | None = None,
    reserve: int = 0,
    progress: bool = True,
    **changes: Any,
) -> Model:
    """Load a model with its weights on a device, ready for inference.

    path_or_id: as `resolve` takes it. options: `LoadOptions`, such as an `EngineSettings`; changes: fields that
    override them, by name. device: overrides theirs.
    dtype: every weight is converted to it; default: what config.json says (GGUF: bf16), and fp32 on a CPU.
    quantize: rounds weights as they are read, as `whorl quantize` does.
    unpack: hold quantised weights, and on a CPU those of 16 bits, as plain values in `dtype`; default: on a CPU if they
    fit into memory, and elsewhere for GGUF files. It changes memory and speed, but no result, with one exception: on a
    CPU with whorl's kernels (docs/cpu.md) a GGUF file's weights stay in its bits by default, and their products take
    tokens in 16 bits. True and False give those of fp32.
    max_model_len: the longest sequence; default: the model's context length, see `whorl.nn.Rope`.
    tp: read only this rank's shard of the weights.
    reserve: bytes of memory that are needed for other things than weights.
    Raises ValueError if the checkpoint cannot be read, does not fit its config.json or does not fit into memory.
    Example: `load_model("Qwen/Qwen3-0.6B", device="cpu")`
    """
    options = replace(options or LoadOptions(), **changes)
    quantize, unpack, max_length = options.quantize, options.unpack, options.max_model_len
    device = numbered(torch.device(device or options.device or default_device()))
    formats.check_scheme(quantize, device.type)
    path = resolve(path_or_id)
    if (tp or ONE).rank == 0:
        dcp.check_digests(path)
    with open_checkpoint(path, device=device, backend=options.backend) as checkpoint:
        kind = _dtype(options.dtype, checkpoint.config, device)
        checkpoint = _with_stored(rounded(checkpoint, quantize), kind, device)
        model = build(checkpoint.config, device="meta", dtype=kind, tp=tp, max_length=max_length)
        check_fit(model, checkpoint)  # before memory is allocated for the sizes in config.json
        num_ranks = (tp or ONE).size
        kernels = unpack is None and num_ranks == 1 and _has_kernels(checkpoint, kind, device)
        if unpack is None:
            unpack = not kernels and _unpacks(model, checkpoint, device, reserve, num_ranks=num_ranks)
        if checkpoint.packed is not None and not unpack:
            checkpoint = _for_kernels(checkpoint.packed()) if kernels else checkpoint.packed()
            model = build(checkpoint.config, device="meta", dtype=kind, tp=tp, max_length=max_length)
            check_fit(model, checkpoint)
        memory.check_weights(model, checkpoint.path, device, unpack=unpack, reserve=reserve, num_ranks=num_ranks)
        fill(_allocated(model, device), checkpoint, progress=progress, unpack=unpack)
    if quantize is not None and (tp or ONE).rank == 0:
        matrices = {name: module for name, module in model.named_modules() if isinstance(module, Matrix)}
        if (line := formats.rounder(quantize).describe(matrices)) is not None:
            log.warning("%s", line)
    return model  # type: ignore[no-any-return]


def load_prediction(path_or_id: str | Path | None, target: Any, *, progress: bool = True) -> Model:
    """Load the layer of multi-token prediction of `target`, a model that was loaded from the same checkpoint; with
    several ranks, this rank's shard of it."""
    with open_checkpoint(resolve(path_or_id), device=_device(target)) as checkpoint:
        model = _prediction(target, checkpoint.config)
        if not any(name.startswith(model.only) for name in checkpoint.sources):
            raise ValueError(
                f"{checkpoint.path}: config.json has num_nextn_predict_layers, and the files hold no {model.only}*: "
                "the layer of multi-token prediction is missing from this checkpoint"
            )
        check_fit(model, checkpoint)
        unpack = _unpacks(model, checkpoint, _device(target), num_ranks=target.ranks.size)
        memory.check_weights(model, checkpoint.path, _device(target), unpack=unpack, num_ranks=target.ranks.size)
        fill(_allocated(model, _device(target)), checkpoint, progress=progress, unpack=unpack)
    return model  # type: ignore[no-any-return]


def random_prediction(target: Any) -> Model:
    """Return the layer of multi-token prediction of `target` with random weights."""
    return _randomized(_allocated(_prediction(target, {}), _device(target)))


def _prediction(target: Any, config: Mapping[str, Any]) -> Any:
    """Return the layer of multi-token prediction on "meta"."""
    weight_format = formats.find(config)
    with torch.device("meta"):
        model = target.prediction()
        create_parameters(model, weight_format, target.dtype)
    model.ignored = (*model.ignored, *weight_format.ignored)
    return model.eval()


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device  # type: ignore[no-any-return]


def rounded(checkpoint: Checkpoint, quantize: str | None) -> Checkpoint:
    """Return the checkpoint, with weights that are quantised as they are read if `quantize` is set."""
    if quantize is None:
        return checkpoint
    skeleton = build(checkpoint.config, device="meta", dtype=torch.float32)
    check_fit(skeleton, checkpoint)
    return quantized(checkpoint, skeleton, quantize).checkpoint


def build(
    config: Mapping[str, Any],
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    tp: Ranks | None = None,
    max_length: int | None = None,
) -> Any:
    """Build the model of a config.json with weights that are allocated but not initialised.

    Raises ValueError if the architecture is unknown or the sizes are impossible.
    """
    model_class, weight_format = models.find(config), formats.find(config)
    values = model_class.config_class.from_hf(config)
    try:
        with torch.device("meta"):
            ranks = replace(tp or ONE, unit=weight_format.unit)
            model = model_class(values, dtype=dtype, ranks=ranks, max_length=max_length)
            create_parameters(model, weight_format, dtype)
    except RuntimeError as error:  # torch raises it for sizes that no computer can hold
        raise ValueError(f"config.json: the sizes make no model: {error}") from error
    model.ignored = (*model.ignored, *weight_format.ignored)
    return _allocated(model, torch.device(device)).eval()


def _allocated(model: Any, device: torch.device) -> Any:
    """Allocate the weights on `device`; what has values already is moved. `to_empty` would call `empty_like` on meta
    tensors, which imports sympy and takes half a second at every start."""
    if device.type == "meta":
        return model

    def allocated(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) if t.is_meta else t.to(device)

    return model._apply(allocated)


def random_model(
    config: Mapping[str, Any], *, device: str | torch.device, dtype: torch.dtype, max_length: int | None = None
) -> Model:
    """Return a model of this config with random weights, to measure speed without a checkpoint."""
    return _randomized(build(config, device=device, dtype=dtype, max_length=max_length))


def _randomized(model: Any) -> Model:
    generator = torch.Generator(_device(model)).manual_seed(0)
    for _, layer in weighted(model):
        layer.randomize(generator)
    return model  # type: ignore[no-any-return]


def _dtype(dtype: torch.dtype | str | None, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype of the weights: the one passed, else fp32 on a CPU, else the one in config.json, else bf16."""
    if dtype is None and accelerator(device.type) is None:
        dtype = "float32"  # products accumulate in fp32, so a CPU would convert 16-bit weights in every product
    if dtype is None:
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"load_model: dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _with_stored(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Return the checkpoint with `packed`, if it is a plain one of 16 bits that would become fp32 on a CPU."""
    is_quantised = checkpoint.packed is not None or formats.find(checkpoint.config) is not formats.ALL_DENSE
    if is_quantised or dtype != torch.float32 or accelerator(device.type) is not None:
        return checkpoint
    tensors = {name: (len(source.shape), source.gives) for name, source in checkpoint.sources.items()}
    if (settings := formats.settings_as_stored(tensors)) is None:
        return checkpoint
    as_stored = replace(checkpoint, config={**checkpoint.config, "quantization_config": settings})
    return replace(checkpoint, packed=lambda: as_stored)


def _unpacks(model: Any, checkpoint: Checkpoint, device: torch.device, reserve: int = 0, *, num_ranks: int = 1) -> bool:
    """Return whether to unpack weights of fewer bits: on a CPU if plain ones fit into memory, those of quantised
    checkpoints twice, because the CPU's library keeps a reordered copy for small products. All ranks on CPUs may be on
    this machine.

    On accelerators GGUF blocks are unpacked, because no kernel multiplies them.
    """
    if accelerator(device.type) is not None:
        return checkpoint.packed is not None
    num_bytes, free = num_ranks * memory.weight_bytes(model, unpack=True), free_memory()
    if formats.find(checkpoint.config) is formats.ALL_DENSE and checkpoint.path.suffix != ".gguf":
        unpacks = free is None or num_bytes + memory.largest_bytes(model) + reserve <= free
        if checkpoint.packed is not None and not unpacks:
            log.warning(
                "the weights stay in 16 bits, because in %s they would take %.3g GB and %.3g GB are free: products "
                "take longer, with the same results",
                *(str(model.dtype).removeprefix("torch."), num_bytes / 1e9, (free or 0) / 1e9),
            )
        return unpacks
    return free is None or 2 * num_bytes <= free


def _has_kernels(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the weights of a GGUF file stay in its bits, to be multiplied by tokens in 16. Log why."""
    if checkpoint.path.suffix != ".gguf" or accelerator(device.type) is not None or dtype != torch.float32:
        return False
    if checkpoint.packed is None:  # they are rounded otherwise
        return False
    if cpu_library.missing() is not None:
        log.warning("%s", cpu_library.describe())
        return False
    log.warning(
        "%s: weights in the file's own bits, tokens in 16 (%s); --unpack computes with both in fp32",
        *(checkpoint.path.name, cpu_library.variant()),
    )
    return True


def _for_kernels(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of packed weights, whose products take tokens in 16 bits."""
    settings = {**checkpoint.config["quantization_config"], "token_bits": 16}
    return replace(checkpoint, config={**checkpoint.config, "quantization_config": settings})


@contextmanager
def open_checkpoint(
    path: Path, *, device: str | torch.device = HOST, backend: str = "auto"
) -> Iterator[Checkpoint]:  # fmt: skip
    """Open a checkpoint; its tensors are read later.

    path: from `resolve`. device: where safetensors are read to. backend: as of `LoadOptions`.
    """
    if path.suffix == ".gguf":
        if backend == "transformers":
            raise ValueError(f"{path}: backend is transformers, which takes safetensors, and this is a GGUF file")
        from .gguf import open_gguf

        yield _check_counts(open_gguf(path))
        return
    config = read_config(path)
    config |= {} if backend == "auto" else {models.BACKEND: backend}
    model_class = models.find(config)
    with ExitStack() as stack:
        if (path / METADATA).is_file() and not any(path.glob("*.safetensors")):
            trained_names = getattr(model_class, "trained_names", None)
            sources = dcp.open_dcp(path, *((None,) if trained_names is None else trained_names(config)))
        else:
            sources = open_safetensors(path, torch.device(device), stack)
        tensors = getattr(model_class, "tensors", None)
        if tensors is not None:
            sources = make(tensors(config, {name: source.shape for name, source in sources.items()}), sources)
        yield _check_counts(Checkpoint(path=path, config=config, sources=sources))


def _check_counts(checkpoint: Checkpoint) -> Checkpoint:
    """Raise ValueError if config.json has more layers or experts than there are tensors, before a model is built."""
    config, num_tensors = checkpoint.config, len(checkpoint.sources)
    parts = [part for part in (config, *map(config.get, ("text_config", "vision_config"))) if isinstance(part, dict)]
    for part in parts:
        for name in ("num_hidden_layers", "depth", "num_experts", "num_local_experts", "n_routed_experts"):
            value = part.get(name)
            if isinstance(value, int) and value > num_tensors:
                raise ValueError(f"{checkpoint.path}: {name} is {value}, and the files hold {num_tensors} tensors")
    return checkpoint
