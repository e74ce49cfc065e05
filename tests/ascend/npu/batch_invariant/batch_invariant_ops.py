"""AscendC's package of batch-invariant operators on paper: registers them under names that nobody may rely on.

Attention takes the names of torch_npu's, because vllm-ascend puts it in that one's place.
"""

import torch
import torch_npu  # noqa: F401 - registers the operator whose schema is copied

ATTENTION = str(torch.ops.npu.npu_fused_infer_attention_score.default._schema).split("(", 1)[1]
SCHEMAS = (
    "npu_mm_batch_invariant(Tensor first, Tensor second) -> Tensor",
    "npu_reduce_sum_batch_invariant(Tensor first, int second, bool third) -> Tensor",
    "npu_log_softmax_batch_invariant(Tensor first, int second) -> Tensor",
    f"npu_fused_infer_attention_score_batch_invariant({ATTENTION}",
)
library = torch.library.Library("batch_invariant_ops", "DEF")
for schema in SCHEMAS:
    library.define(schema)
