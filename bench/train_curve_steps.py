"""The work of `python -m bench.train_curve`: trains a small model, and shows and plots losses and gradient norm."""

import copy
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whorl import device as devices
from whorl.bench.provenance import Document, provenance
from whorl.bench.report import save_figure
from whorl.bench.train import log, switches_of
from whorl.bench.train_model import CHUNK, balance, build, build_optimizer, indexer_losses
from whorl.titan.data import ByteTokenizer, Corpus, WindowLoader, text_files
from whorl.titan.deepseek_v32.args import FLAVOURS
from whorl.titan.deepseek_v32.core import Core
from whorl.titan.deepseek_v32.loss import chunked_cross_entropy

PLOTTED = {"loss": "loss", "grad_norm": "gradient norm, before clipping", "indexer_kl": "indexer KL, mean of layers"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveSettings:
    """Validated settings of a training curve."""

    device: str
    switches: frozenset[str]
    flavour: str = "debug"
    before: int = 100  # steps before the indexers learn, so that attention is no longer uniform
    steps: int = 200
    batch: int = 4
    seq: int = 2048
    lr: float = 1e-3
    warmup: int = 20
    data: str = ""  # folder of text; empty: the sources of the Python standard library
    seed: int = 1

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: it rises over `warmup` steps and falls to a tenth over the last half."""
        half = (self.before + self.steps) / 2
        return self.lr * min(1.0, step / self.warmup, 1 - 0.9 * (step - half) / half)

    @staticmethod
    def resolve(*, device: str | None, tiny: bool | None, row: str, steps: int, before: int = 100) -> "CurveSettings":
        """Return the settings with defaults for this machine."""
        device = devices.require(device or devices.default_device())
        is_tiny = devices.accelerator(device) is None if tiny is None else tiny
        sizes: dict[str, Any] = {"flavour": "tiny", "seq": 64} if is_tiny else {}
        return CurveSettings(device=device, switches=switches_of(row), before=before, steps=steps, **sizes)


def run(settings: CurveSettings) -> Document:
    """Train; returns {"header": ..., "steps": [{"step", "loss", "grad_norm", "indexer_kl", "layers"}, ...]}.

    The attention of a new model is uniform, and so is the prediction of a new indexer, so their divergence starts near
    0. Therefore the indexers start to learn after `before` steps, as they do in a model that was trained dense; the
    steps before that have no `indexer_kl`.
    """
    torch.manual_seed(settings.seed)
    args = copy.deepcopy(FLAVOURS[settings.flavour])
    args.max_seq_len, args.moe_args.use_grouped_mm = settings.seq, settings.device == "cuda"
    files = text_files(settings.data, ".py")
    corpus = Corpus(files, ByteTokenizer(), settings.seq)
    loader = WindowLoader(corpus, batch_size=settings.batch, dp_rank=0, dp_world_size=1, seed=settings.seed)
    # fp32 weights and bf16 compute, as TorchTitan does on one device.
    model = build(args, settings.device, torch.float32, settings.switches)
    optimizer = build_optimizer(model, settings.switches, settings.lr)
    document: Document = {"header": _header(settings, len(corpus.tokens), model), "steps": []}
    begin = time.perf_counter()
    set_coefficient(model, 0.0)
    for step, (inputs, labels) in zip(range(1, settings.before + settings.steps + 1), loader, strict=False):
        if step == settings.before + 1:
            set_coefficient(model, 1.0)
        row = {"step": step, **_train(settings, model, optimizer, inputs["input"], labels, step)}
        document["steps"].append(row)
        if step in (1, 2, settings.before + 1) or step % 20 == 0:
            numbers = ", ".join(f"{name} {row[name]:.4f}" for name in PLOTTED if row[name] is not None)
            log(f"step {step}: {numbers}; {time.perf_counter() - begin:.1f} s")
    document["header"]["seconds"] = time.perf_counter() - begin
    return document


def set_coefficient(model: nn.Module, coefficient: float) -> None:
    """Set the coefficient of the indexers' losses; with 0 the losses are not computed."""
    for core in model.modules():
        if isinstance(core, Core):
            core.settings = dataclasses.replace(core.settings, coefficient=coefficient)


def _train(
    settings: CurveSettings, model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor, step: int
) -> Document:
    """Run one training step; returns its losses and gradient norm. tokens, labels: [batch, seq]."""
    for group in optimizer.param_groups:
        group["lr"] = settings.rate(step)
    tokens, labels = tokens.to(settings.device), labels.to(settings.device)
    with torch.autocast(settings.device, torch.bfloat16, enabled=settings.device != "cpu"):
        logits = model(tokens)
    loss = chunked_cross_entropy(logits, labels, chunk=CHUNK) / labels.numel()
    del logits
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    balance(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    layers = [float(kl) for kl in indexer_losses(model)] if step > settings.before else []
    return {
        "loss": loss.item(),
        "grad_norm": float(norm),
        "indexer_kl": sum(layers) / len(layers) if layers else None,
        "layers": layers,
    }


def _header(settings: CurveSettings, num_tokens: int, model: Any) -> Document:
    return {
        **provenance(settings.device),
        "flavour": settings.flavour,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "switches": sorted(settings.switches),
        "text": settings.data or "Python standard library sources",
        "text_tokens": num_tokens,
        "batch": settings.batch,
        "seq": settings.seq,
        "lr": settings.lr,
        "lr_schedule": f"rises over {settings.warmup} steps, falls to a tenth over the last half",
        "before": settings.before,
    }


def render(document: Document) -> str:
    """Return the document as text."""
    header, steps = document["header"], document["steps"]
    size = f"{header['num_parameters'] / 1e6:.1f} M parameters, {header['batch']} x {header['seq']} tokens per step"
    lines = [
        f"device    {header['device']}: {header['device_name']}",
        f"model     {header['flavour']}: {size}, switches {'+'.join(header['switches']) or 'none'}",
        f"text      {header['text']}: {header['text_tokens']:,} bytes",
    ]
    for name, meaning in PLOTTED.items():
        first, last = (_mean(steps, name, part) for part in (slice(0, 10), slice(-10, None)))
        lines.append(f"{name:12}{first:.4f} -> {last:.4f} ({meaning}; means of the first and the last 10 steps)")
    return "\n".join(lines)


def _mean(steps: list[Document], name: str, part: slice) -> float:
    values = [row[name] for row in steps if row[name] is not None][part]
    return sum(values) / len(values)


def is_good(document: Document) -> bool:
    """Return whether the losses of the model and of the indexers have fallen."""
    steps = document["steps"]
    return all(
        _mean(steps, name, slice(-10, None)) < _mean(steps, name, slice(0, 10)) for name in ("loss", "indexer_kl")
    )


def write_plot(document: Document, path: Path) -> None:
    """Write a chart of the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, header = document["steps"], document["header"]
    figure, axes = pyplot.subplots(1, len(PLOTTED), figsize=(5 * len(PLOTTED), 3.6))
    for axis, (name, title) in zip(axes, PLOTTED.items(), strict=True):
        shown = [row for row in steps if row[name] is not None]
        axis.plot([row["step"] for row in shown], [row[name] for row in shown])
        axis.axvline(header["before"], color="grey", linestyle=":", label="indexers start to learn")
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"DeepSeek-V3.2 {header['flavour']} on {header['text']}, {header['device_name']}")
    figure.tight_layout()
    save_figure(figure, path, dpi=120)
    pyplot.close(figure)
