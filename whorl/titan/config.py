"""The `[whorl]` section of a TorchTitan job, added by `--job.custom_config_module whorl.titan.config`."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Whorl:
    """The options of the `[whorl]` section."""

    stage: Literal["sparse", "warmup"] = "sparse"
    """sparse: everything trains, the indexer only by its KL loss; warmup: only indexers train, attention is dense."""

    indexer_loss_coeff: float = 1.0
    """Factor of the indexer loss, which is the mean over tokens of a layer's KL divergence."""

    mtp_loss_coeff: float = 0.3
    """Factor of the loss of the multi-token prediction layers, if the model has them."""

    loss_chunk: int = 0
    """Number of tokens whose cross entropy is computed at once in fp32; 0: all tokens."""

    attention: Literal["auto", "masked", "absorbed"] = "auto"
    """How whorl_dsa computes attention. masked: reads all keys, for short sequences; absorbed: reads only the latents
    of selected keys; auto: chooses by sequence length and device."""

    bootstrap_indexer: bool = False
    """Accept a Hugging Face checkpoint without indexer weights and start the indexers from their initial values."""

    no_codegen: bool = False
    """Compile without generating kernels: torch.compile only runs its graph passes and calls the usual operators."""

    health_every: int = 0
    """Steps between measurements of each layer's indexer: recall (share of dense attention that falls on selected keys)
    and ties (share of queries with an unselected key that scores like the last selected one). 0: never."""

    data: str = ""
    """A text file or a folder of text files; "": Python's standard library; "synthetic": random tokens."""

    data_suffixes: str = ".py,.md,.rst,.txt,.jsonl"
    """Suffixes of the files to read in a folder. From a .jsonl file the field `text` of each line is read."""

    tokenizer: Literal["auto", "bytes", "hf"] = "auto"
    """bytes: UTF-8 bytes, no files; hf: from model.hf_assets_path; auto: hf if that folder has one, else bytes."""

    check_converters: bool = True
    """Before training, compare a small sample of each replaced module with float64; stop if its error is too large."""

    fall_back: bool = False
    """Resume from the newest complete checkpoint when a newer one is damaged, instead of raising an error."""

    accept_changes: bool = False
    """Resume from a checkpoint that was written with other settings of the model, instead of raising an error."""


@dataclass
class Optimizer:
    """Options added to TorchTitan's `[optimizer]` section, because its optimizer builder gets no other section."""

    swap: bool = False
    """Keep AdamW's moments in pinned host memory between steps."""

    moments: Literal["exact", "bfloat16", "int8"] = "exact"
    """Format of swapped moments on the host. exact: in the dtype of the weights, as torch does; bfloat16 and int8 round
    stochastically."""

    swap_ring: int = 3
    """Buckets of swapped moments on the device at once, 2**25 elements each. A longer ring takes more memory and is
    filled earlier: what it holds is loaded during backward and stored during the next forward."""

    swap_prefetch: float | None = None
    """Share of the list of parameters at which loads of swapped moments start in backward, from 0 (at its end) to 1 (at
    its start). None: early enough to fill the ring."""

    watch: bool = True
    """Stop before an update that is not finite and name the layer; reads one number from the device in each step."""


@dataclass
class JobConfig:
    """The sections that TorchTitan merges into its own job config."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    whorl: Whorl = field(default_factory=Whorl)


def settings(job_config: Any) -> Whorl:
    """Return the `[whorl]` section of a job, or the defaults if the job has none."""
    return getattr(job_config, "whorl", None) or Whorl()
