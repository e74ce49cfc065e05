"""What quantised values are stored as: the dtype of the codes and the largest of them."""

import torch

FORMATS: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
