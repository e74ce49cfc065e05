"""How the weights of a model are loaded. This module imports no torch.

A field is declared once: `EngineSettings` begins with these, commands have them as options, and `load_model` gets them
on every rank.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from whorl.fields import check, option

MODEL = "Model"  # the section of --help
DTYPES = {"half": "float16", "float": "float32", "auto": None}  # vLLM's names for dtypes


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `load_model`. None means: the best value for this machine and model; each field's text says which.

    Raises ValueError for a value that is out of range.
    """

    device: Literal["cpu", "cuda", "npu"] | None = option(
        None, "Device to run on. Default: the best one of this machine.", panel=MODEL
    )
    dtype: Literal["bfloat16", "float16", "float32", "half", "float", "auto"] | None = option(
        None, "Dtype of the weights in memory. Default: the model's; float32 on a CPU.", vllm=("--dtype",), panel=MODEL
    )
    quantize: Literal["w4a16", "w8a8", "fp8", "cpu4"] | None = option(
        None,
        "Quantize the weights while they are loaded, as whorl quantize does; cpu4: 4 bits for Arm CPUs.",
        panel=MODEL,
    )
    unpack: bool | None = option(
        None,
        "Unpack quantized weights to plain ones. Default: on a CPU if they fit; elsewhere only GGUF files.",
        "--unpack/--no-unpack",
        panel=MODEL,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and answer together, in tokens. Default: what fits.",
        "--max-seq",
        vllm=("--max-model-len",),
        panel=MODEL,
        least=2,
    )

    def __post_init__(self) -> None:
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")  # a torch.dtype is accepted
        object.__setattr__(self, "dtype", DTYPES.get(dtype, dtype) if dtype else None)
        check(self)

    def load_options(self) -> dict[str, Any]:
        """Return the fields of this class, also of a subclass, as another rank's `LoadOptions` takes them."""
        values = asdict(self)
        return {field.name: values[field.name] for field in fields(LoadOptions)}
