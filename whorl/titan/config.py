"""The `[whorl]` section of a TorchTitan job: `--job.custom_config_module whorl.titan.config` merges it in."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Whorl:
    stage: Literal["sparse", "warmup"] = "sparse"
    """sparse: all trains, the indexer by its KL loss only; warmup: only the indexer trains, on dense attention."""

    indexer_loss_coeff: float = 1.0
    """Times the mean over tokens of a layer's KL loss."""

    mtp_loss_coeff: float = 0.3
    """Times the loss of the multi-token prediction layers, where the model has them."""

    loss_chunk: int = 0
    """Tokens whose logits are in memory at once in the cross entropy; 0: all."""

    attention: Literal["auto", "masked", "absorbed"] = "auto"
    """Of whorl_dsa. masked: all keys are read, in heads of their own; absorbed: the chosen keys; auto: by length."""

    bootstrap_indexer: bool = False
    """A Hugging Face checkpoint without indexer weights is taken; the indexer then starts from its initial values."""

    no_codegen: bool = False
    """torch.compile without generated kernels: graph passes and one wrapper, every operator the library's own."""

    health_every: int = 0
    """Steps between reports on each layer's indexer (KL, recall, ties); 0: never."""

    data: str = ""
    """A text file or a folder of them; "": the Python standard library's sources; "synthetic": random tokens."""

    data_suffixes: str = ".py,.md,.rst,.txt,.jsonl"
    """Which files of a folder are read. Of a .jsonl file the field `text` of each line."""

    tokenizer: Literal["auto", "bytes", "hf"] = "auto"
    """bytes: no files needed; hf: from model.hf_assets_path; auto: hf where that folder has a tokenizer, else bytes."""

    check_converters: bool = True
    """Compare a sample of what converters replace with float64 before training; a difference is an error."""

    fall_back: bool = False
    """Where the newest checkpoint is damaged, resume from the newest whole one before it; else that is an error."""

    accept_changes: bool = False
    """Resume although the checkpoint was written with other settings of the model; else that is an error."""


@dataclass
class Optimizer:
    """More for TorchTitan's own section: its builder of optimizers is given that section alone."""

    swap: bool = False
    """AdamW's moments rest in pinned host memory between steps."""

    moments: Literal["exact", "bfloat16", "int8"] = "exact"
    """How swapped moments are kept on the host. exact: in the dtype of the weights, as torch does."""

    watch: bool = True
    """Stop before an update that is not finite, and name the layer; one look at the device for each step."""


@dataclass
class JobConfig:
    optimizer: Optimizer = field(default_factory=Optimizer)
    whorl: Whorl = field(default_factory=Whorl)
