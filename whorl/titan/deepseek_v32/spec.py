"""The TrainSpec of DeepSeek-V3.2, and `check_layout`, which checks a job before it starts."""

from functools import partial

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.protocols.train_spec import TrainSpec

from whorl.titan.data import build_dataloader, build_tokenizer
from whorl.titan.metrics import WhorlMetrics
from whorl.titan.optimizer import build_optimizers
from whorl.titan.pipeline import build_pipeline

from . import health
from .args import FLAVOURS
from .hf import DeepSeekV32StateDictAdapter
from .infra.parallelize import check_layout, parallelize_deepseek_v32
from .loss import build_loss
from .model import DeepSeekV32Model

__all__ = ["check_layout", "train_spec"]


def train_spec() -> TrainSpec:
    """Return the classes and functions that TorchTitan builds a training run from."""
    return TrainSpec(
        model_cls=DeepSeekV32Model,
        model_args=FLAVOURS,
        parallelize_fn=parallelize_deepseek_v32,
        pipelining_fn=build_pipeline,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_loss,
        build_metrics_processor_fn=partial(WhorlMetrics, figures=health.collect),
        state_dict_adapter=DeepSeekV32StateDictAdapter,
    )
