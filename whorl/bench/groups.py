"""Groups of operators that `whorl bench ops` accepts by one name."""

GROUPS = {
    "sparse_attention": (
        "sparse_attention",
        "sparse_attention_backward",
        "masked_attention",
        "masked_attention_backward",
        "selection_mask",
    ),
    "indexer": (
        "index_scores",
        "top_k",
        "lightning_indexer",
        "indexer_target",
        "indexer_kl",
        "indexer_kl_gradients",
        "dense_indexer_target",
        "dense_indexer_kl",
        "dense_indexer_kl_gradients",
        "hadamard",
    ),
    "moe": (
        "route",
        "permute",
        "permute_backward",
        "unpermute",
        "unpermute_backward",
        "grouped_matmul",
        "grouped_matmul_backward",
        "swiglu",
        "swiglu_backward",
        "geglu",
        "geglu_backward",
    ),
}
