"""What the processes of titan_job start from: TorchTitan imported, made ready for CPU ranks, our model known to it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from whorl.titan import cpu

cpu.install()
torch.set_num_threads(1)

from whorl.titan.deepseek_v32.args import FLAVOURS  # noqa: E402
from whorl.titan.register import register  # noqa: E402
from whorl.titan.trainer import WhorlTrainer  # noqa: E402

register()
# Two layers, one of them with experts: a checkpoint's cost is in the number of its tensors.
small = FLAVOURS["small"] = dataclasses.replace(FLAVOURS["tiny"], n_layers=2)
FLAVOURS["deeper"] = dataclasses.replace(small, n_layers=3)
FLAVOURS["with_mtp"] = dataclasses.replace(small, n_mtp_layers=1)
FLAVOURS["fewer_keys"] = dataclasses.replace(small, index_topk=8)
time.sleep = lambda seconds: None  # TorchTitan's two seconds at the end of a run


class Telling(WhorlTrainer):
    """Tells of losses, and of when a checkpoint is begun and done."""

    def __init__(self, config: Any, tell: Callable[[tuple[Any, ...]], None]) -> None:
        self.tell = tell
        super().__init__(config)
        save = self.checkpointer.save

        def told(step: int, last_step: bool = False) -> None:
            is_due = self.checkpointer._should_save(step, last_step)
            if is_due:
                tell(("saving", step))
            save(step, last_step)
            if is_due:
                tell(("saved", step))

        self.checkpointer.save = told  # type: ignore[method-assign]

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**batch)
        self.tell(("loss", self.step, float(loss.detach()).hex()))
        return loss
