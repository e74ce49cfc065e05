"""What TorchTitan 0.2 learns from us: the model `deepseek_v32` and the converters. It is told, not changed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.protocols.train_spec import TrainSpec

MODEL = "deepseek_v32"


def train_spec() -> "TrainSpec":
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.protocols.train_spec import TrainSpec

    from whorl.titan.data import build_dataloader, build_tokenizer
    from whorl.titan.deepseek_v32.args import FLAVOURS
    from whorl.titan.deepseek_v32.hf import DeepSeekV32StateDictAdapter
    from whorl.titan.deepseek_v32.model import DeepSeekV32Model, build_loss
    from whorl.titan.metrics import build_metrics_processor
    from whorl.titan.optimizer import build_optimizers
    from whorl.titan.parallelize import parallelize_deepseek_v32
    from whorl.titan.pipeline import pipeline_deepseek_v32

    return TrainSpec(
        model_cls=DeepSeekV32Model,
        model_args=FLAVOURS,
        parallelize_fn=parallelize_deepseek_v32,
        pipelining_fn=pipeline_deepseek_v32,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_loss,
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=DeepSeekV32StateDictAdapter,
    )


def register() -> None:
    """Once in a process; again it does nothing."""
    from torchtitan.protocols import model_converter
    from torchtitan.protocols import train_spec as specs

    from whorl.titan.converters import CONVERTERS

    if MODEL not in specs._extra_train_specs:
        specs.register_train_spec(MODEL, train_spec())
    for name, converter in CONVERTERS.items():
        if name not in model_converter._registry_model_converter_cls:
            model_converter.register_model_converter(converter, name)
