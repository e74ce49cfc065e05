"""The models that `whorl bench train` times: our DeepSeek-V3.2 with a set of switches, and that of transformers."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whorl.titan.converters.table import CONVERTERS
from whorl.titan.deepseek_v32.args import FLAVOURS, DeepSeekV32Args
from whorl.titan.deepseek_v32.core import Core, pop_log
from whorl.titan.deepseek_v32.hf import to_hf_config
from whorl.titan.deepseek_v32.infra.compiled import compile_blocks
from whorl.titan.deepseek_v32.loss import chunked_cross_entropy
from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.swap_optimizer import SwapAdamW

CONVERTED = ("dsa", "rms_norm", "rope", "permute", "gmm")  # whorl_* names of `--model.converters`
SWAPPED = {"swap": "exact", "swap8": "int8"}  # switches that move moments to the host, and the format there
SWITCHES = (*CONVERTED, "compile", *SWAPPED, "checkpoint")  # the optimisations that a row can have
CHUNK = 512  # tokens for which the cross entropy is computed at once
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The size of a model and of its step."""

    layers: int
    seq: int
    tiny: bool  # a very narrow model, for trying the command
    device: str
    ring: int = 3  # buckets of swapped moments on the device at once

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def args(self) -> DeepSeekV32Args:
        """Return the model's arguments: top-2 of 8 experts, the first layer dense."""
        name = "tiny" if self.tiny else f"{self.layers}l"
        args = copy.deepcopy(FLAVOURS[name if name in FLAVOURS else "4l"])
        args.n_layers, args.max_seq_len = self.layers, self.seq
        args.moe_args.use_grouped_mm = self.device == "cuda"
        return args


@dataclass(kw_only=True, slots=True)
class Trainee:
    """A model and its optimizer. step: runs one training step and returns the loss without waiting for the device."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], Tensor]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- our model


def build(args: DeepSeekV32Args, device: str, dtype: torch.dtype, switches: frozenset[str]) -> DeepSeekV32Model:
    """Return the model with fixed random weights, converted and compiled as in a TorchTitan job."""
    torch.manual_seed(0)
    with _default_dtype(dtype), torch.device(device):
        model = DeepSeekV32Model(args)
        model.init_weights(torch.device(device))
    for name in CONVERTED:
        if name in switches:
            _convert(model, f"whorl_{name}", args.max_seq_len, dtype)
    if "checkpoint" in switches:
        for layer in model.layers.values():
            _checkpoint(layer)
    if "compile" in switches:
        compile_blocks(model)
    return model


# Results of the converters' checks against fp64 in this process, by converter: "" where the check passed.
verdicts: dict[str, str] = {}


def _convert(model: nn.Module, name: str, seq: int, dtype: torch.dtype) -> None:
    """Apply a converter. Its check runs once per process; if it fails, the report shows it and the row still runs."""
    from torchtitan.config import JobConfig

    from whorl.titan.config import Whorl

    job: Any = JobConfig()
    job.training.seq_len = seq
    job.training.mixed_precision_param = str(dtype).removeprefix("torch.")
    converter = CONVERTERS[name](job, None)  # type: ignore[arg-type]  # one rank has no parallel dims
    if name not in verdicts:
        try:
            converter.convert(model)
        except ValueError as error:
            verdicts[name] = str(error)
        else:
            verdicts[name] = ""
            return
    job.whorl = Whorl(check_converters=False)
    converter.convert(model)


def _checkpoint(layer: nn.Module) -> None:
    """Make the layer recompute its whole forward in backward."""
    forward = layer.forward
    layer.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)  # type: ignore[method-assign]


def host_format(switches: frozenset[str]) -> str | None:
    """Return the format of moments that these switches move to the host; None where they stay on the device."""
    return next((name for switch, name in SWAPPED.items() if switch in switches), None)


def build_optimizer(model: nn.Module, switches: frozenset[str], lr: float, ring: int = 3) -> torch.optim.Optimizer:
    """Return AdamW with moments in the dtype of the weights; switches of SWAPPED move them to the host."""
    moments = host_format(switches)
    if moments is not None:
        return SwapAdamW(model.parameters(), lr=lr, moments=moments, ring=ring)
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


@torch.no_grad()
def balance(model: nn.Module) -> None:
    """Update the bias of each expert by its load, as TorchTitan does before an optimizer step."""
    for moe in model.modules():
        coefficient = getattr(moe, "load_balance_coeff", None)
        if coefficient is None:
            continue
        load: Any = moe.tokens_per_expert
        change = coefficient * torch.sign(load.mean() - load)
        moe.expert_bias.add_(change - change.mean())  # type: ignore[union-attr, operator]
        load.zero_()


def ours(shape: Shape, switches: frozenset[str]) -> Trainee:
    """Return our model with these switches, ready to train."""
    args = shape.args()
    model = build(args, shape.device, shape.dtype, switches)
    optimizer = build_optimizer(model, switches, LEARNING_RATE, shape.ring)
    tokens = random_tokens(shape, args.vocab_size, shape.seq + 1)

    def step() -> Tensor:
        logits = model(tokens[:, :-1])
        loss = chunked_cross_entropy(logits, tokens[:, 1:], chunk=CHUNK) / shape.seq
        del logits
        loss.backward()
        balance(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Trainee(model=model, optimizer=optimizer, step=step)


def random_tokens(shape: Shape, vocab_size: int, count: int) -> Tensor:
    """Return token ids [1, count], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (1, count), generator=generator).to(shape.device)


def indexer_losses(model: nn.Module) -> Iterator[Tensor]:
    """Yield the indexer loss [1] of each layer, summed since the last call, and reset it."""
    return (pop_log(core.kl) for core in model.modules() if isinstance(core, Core))


# ---- transformers


def transformers_model(shape: Shape) -> Trainee:
    """Return transformers' model of the same shape, with sdpa and grouped_mm; it does not train its indexer."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    args = shape.args()
    values = to_hf_config(args, shape.dtype)
    for name in ("architectures", "model_type", "num_nextn_predict_layers"):
        values.pop(name)
    config = DeepseekV32Config(**values, use_cache=False)
    config._attn_implementation = "sdpa"
    with _default_dtype(shape.dtype), torch.device(shape.device):
        model: Any = DeepseekV32ForCausalLM(config)
    model.train()
    if shape.device == "cuda":
        model.set_experts_implementation("grouped_mm")
    optimizer = build_optimizer(model, frozenset(), LEARNING_RATE)
    tokens = random_tokens(shape, args.vocab_size, shape.seq)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Trainee(model=model, optimizer=optimizer, step=step)
