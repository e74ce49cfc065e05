"""What `examples/quantisation_quality.py --formats fp8` prints, with a scale for each 128 x 128 values.

    python bench/trials/fp8_blocks_quality.py --tokens 1024

Blocks are the format of DeepSeek's and Qwen's own FP8 checkpoints. `--quantize fp8` rounds a Llama by row instead, so
this program says to it that its models are published in blocks.
"""

import runpy
from pathlib import Path

from whorl.models.llama import Llama

Llama.block_scales = "float"  # type: ignore[attr-defined]
runpy.run_path(str(Path(__file__).parents[2] / "examples" / "quantisation_quality.py"), run_name="__main__")
