"""Convert between Hugging Face's `deepseek_v32` and ours: names, config and files, as transformers reads them."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

from whorl.files import output_file
from whorl.models.deepseek_v32 import INDEXER, NAMES, PREDICTION_TIED, DeepSeekV32Config, flat, layer_of
from whorl.titan.served_files import copy_tokenizer

from .args import DeepSeekV32Args

SHARD = 4 * 2**30  # maximum bytes of a .safetensors file, unless a single tensor is larger


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):
    """TorchTitan's adapter for DeepSeek-V3, with indexers and multi-token prediction (MTP) layers.

    Hugging Face stores MTP layers behind the others, as `model.layers.61` and so on, each with a copy of the embedding
    and of the head; here they are the modules `mtp.0` and so on, and use those of the model.
    """

    model_args: DeepSeekV32Args

    def __init__(self, model_args: DeepSeekV32Args, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)  # type: ignore[arg-type]
        self.from_hf_map = dict(NAMES)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of the model with Hugging Face's names and one tensor for each expert."""
        first_mtp = self.model_args.n_layers
        hf_state = super().to_hf({flat(name, first_mtp): value for name, value in state_dict.items()})
        for layer in sorted({n for name in hf_state if (n := layer_of(name)) is not None and n >= first_mtp}):
            tied = {f"model.layers.{layer}.{theirs}": ours for theirs, ours in PREDICTION_TIED.items()}
            hf_state |= {theirs: state_dict[ours] for theirs, ours in tied.items() if ours in state_dict}
        return hf_state

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of the model from one with Hugging Face's names.

        MTP layers that the model does not have are dropped. Raises ValueError when the indexers are missing, unless
        bootstrap_indexer is set; then they get initial values.
        """
        first_mtp = self.model_args.n_layers
        end = first_mtp + self.model_args.n_mtp_layers
        known = {}
        for name, value in hf_state_dict.items():
            layer = layer_of(name)
            is_tied = layer is not None and layer >= first_mtp and name.split(".", 3)[3] in PREDICTION_TIED
            if not is_tied and (layer is None or layer < end):
                known[name] = value
        known |= self._missing_indexers(known)
        return {_nested(name, first_mtp): value for name, value in super().from_hf(known).items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return _reader_with_bootstrap(super().get_hf_storage_reader(path, from_quantized), self.model_args)

    def _missing_indexers(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return initial values for missing indexers; raises ValueError unless bootstrap_indexer is set."""
        initial: dict[str, Tensor] = {}
        sizes = self.model_args.config.indexer_sizes()
        for query in (name for name in hf_state_dict if name.endswith(".self_attn.q_a_proj.weight")):
            prefix = query.removesuffix("q_a_proj.weight") + "indexer."
            missing = [name for name in INDEXER if prefix + name not in hf_state_dict]
            if missing and not self.model_args.bootstrap_indexer:
                raise ValueError(_no_indexer([prefix + name for name in missing]))
            generator = torch.Generator().manual_seed(layer_of(query) or 0)  # the same on every rank
            for name in missing:
                size = sizes[name]
                like = hf_state_dict[query]
                value = torch.zeros(size) if name == "k_norm.bias" else torch.ones(size)
                if len(size) == 2:
                    value = torch.nn.init.trunc_normal_(value, std=0.02, generator=generator)
                initial[prefix + name] = value.to(like.device, like.dtype)
        return initial


def _nested(name: str, first: int) -> str:
    """Return the name in the model of a tensor, the inverse of `flat`: layers.61.X -> mtp.0.block.X if first is 61."""
    match = re.match(r"layers\.(\d+)\.(mtp\.)?(.*)", name)
    if not match or int(match[1]) < first:
        return name
    return f"mtp.{int(match[1]) - first}.{'' if match[2] else 'block.'}{match[3]}"


def _no_indexer(missing: list[str]) -> str:
    """Return the message for a checkpoint without these tensors of indexers."""
    return (
        f"the checkpoint has no {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}: it is a dense "
        "DeepSeek-V3. Set whorl.bootstrap_indexer (and whorl.stage to warmup) to start indexers from initial values"
    )


def _reader_with_bootstrap(reader: HuggingFaceStorageReader, args: DeepSeekV32Args) -> HuggingFaceStorageReader:
    """Return the reader, changed so that indexers missing from the files keep their current values.

    Its metadata lists them, because torch would otherwise refuse the files as incomplete; `read_data` skips them.
    Raises ValueError when indexers are missing and bootstrap_indexer is not set.
    """
    known = reader.read_metadata().state_dict_metadata
    layers = {layer for name in known if (layer := layer_of(name)) is not None and layer < args.n_layers}
    absent = {
        name: torch.Size(size)
        for layer in sorted(layers)
        for tail, size in args.config.indexer_sizes().items()
        if (name := f"model.layers.{layer}.self_attn.indexer.{tail}") not in known
    }
    if absent and not args.bootstrap_indexer:
        raise ValueError(_no_indexer(list(absent)))

    class Reader(type(reader)):  # type: ignore[misc]
        def read_metadata(self) -> Metadata:
            metadata = super().read_metadata()
            for name, size in absent.items():
                full_chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
                metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(), size, [full_chunk])
            return metadata

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            items = [item for item in plan.items if item.storage_index.fqn not in absent]
            return super().read_data(dataclasses.replace(plan, items=items), planner)

    if absent:
        reader.__class__ = Reader
    return reader


# ---- configuration


def to_hf_config(args: DeepSeekV32Args, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the values of config.json, without what a job sets, such as the stage and the loss coefficients."""
    return args.hf_config(str(dtype).removeprefix("torch."))


def from_hf_config(values: Mapping[str, Any]) -> DeepSeekV32Args:
    """Return the model arguments that the values of a config.json describe."""
    return DeepSeekV32Args.from_config(DeepSeekV32Config.from_hf(values))


# ---- files


def save_pretrained(state_dict: dict[str, Any], args: DeepSeekV32Args, folder: str | Path) -> None:
    """Write a state dict of the model, with full tensors, as a folder that transformers' `from_pretrained` can load.

    The tensors keep their dtype; config.json names that of the attention. No tokenizer is written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = DeepSeekV32StateDictAdapter(args, None).to_hf(state_dict)
    files: list[dict[str, Tensor]] = [{}]
    free_bytes = SHARD
    for name, value in tensors.items():
        size = value.numel() * value.element_size()
        if files[-1] and size > free_bytes:
            files.append({})
            free_bytes = SHARD
        files[-1][name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        free_bytes -= size
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, shard in zip(names, files, strict=True):
        with output_file(folder / name) as path:
            save_file(shard, path, metadata={"format": "pt"})
    weight_map = {tensor: name for name, shard in zip(names, files, strict=True) for tensor in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    dtype = next(value.dtype for name, value in tensors.items() if name.endswith("q_a_proj.weight"))
    for name, values in (("model.safetensors.index.json", index), ("config.json", to_hf_config(args, dtype))):
        with output_file(folder / name) as path:
            path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def export_checkpoint(checkpoint: str | Path, args: DeepSeekV32Args, folder: str | Path, dtype: torch.dtype) -> None:
    """Write a TorchTitan checkpoint (a `step-N` folder) of any number of ranks as `save_pretrained` does, on the CPU.

    dtype: of all tensors except the expert biases, which keep theirs. A tokenizer in the checkpoint folder, as `whorl
    train` writes it, is copied. Raises ValueError when the folder is not a checkpoint.

        export_checkpoint("outputs/tiny/checkpoint/step-50", FLAVOURS["tiny"], "exported", torch.bfloat16)
    """
    from whorl.titan.checkpoint_files import BadCheckpoint, check_digests, read_complete, read_states

    from .model import DeepSeekV32Model

    try:
        read_complete(Path(checkpoint))
        check_digests(Path(checkpoint))
    except BadCheckpoint as error:
        raise ValueError(f"{checkpoint} is no step-N folder of a checkpoint to export: {error}") from error
    with torch.device("meta"):
        empty = DeepSeekV32Model(args).state_dict()
    state = {name: torch.empty_like(value, device="cpu") for name, value in empty.items()}
    read_states(state, checkpoint, no_dist=True)
    uncast = ("expert_bias",)  # it selects experts, and must not be rounded
    save_pretrained({n: v if n.endswith(uncast) else v.to(dtype) for n, v in state.items()}, args, folder)
    copy_tokenizer(Path(checkpoint), Path(folder))


def load_pretrained(folder: str | Path) -> dict[str, Tensor]:
    """Return every tensor of a Hugging Face folder by its name there; the model must fit in host memory.

    Raises ValueError when the folder has no .safetensors file.
    """
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors files")
    return {name: value for file in files for name, value in load_file(file).items()}
