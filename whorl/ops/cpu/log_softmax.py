"""Log-probabilities on CPUs: a row is added up in sixteen sums and one tree, with exp and log written out."""

import torch
from torch import Tensor

from .library import library, plain, use_threads


def log_softmax(logits: Tensor) -> Tensor:
    wide, width = plain(logits).contiguous(), logits.shape[-1]
    y = torch.empty(wide.shape)
    use_threads()
    library().whorl_cpu_log_softmax(wide.data_ptr(), wide.numel() // max(width, 1), width, y.data_ptr())
    return y


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return log_softmax(logits).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
