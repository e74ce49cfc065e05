"""Checks of a trainer against its rollout: each names a difference, the mechanism behind it, and what to do."""

from collections.abc import Iterator
from typing import Final

from whorl.doctor.arithmetic import sampling
from whorl.doctor.pair import Pair, pair_rule
from whorl.doctor.promises import has_experts
from whorl.doctor.report import Finding

# By aspect of the rotation: codes of findings on one side that already explain the difference.
ROTATION: Final = {
    "rotary base": ("rotary-base-differs", "rope-theta-lost"),
    "rotary scaling": ("rope-scaling-ignored", "yarn-factor-ignored", "yarn-flags-differ"),
    "rotary axes": (
        "rope-branch-mismatch",
        "mrope-section-differs",
        "mrope-section-dropped",
        "mrope-positions-dropped",
    ),
}
# Frameworks whose rollouts forget cached prefixes with every update of the weights, or keep them apart by version.
RESETS: Final = ("verl", "slime", "vime", "trl", "prime-rl", "nemo-rl")


@pair_rule("sides-rotate-differently")
def rotation_differs(pair: Pair) -> Iterator[Finding]:
    for aspect, codes in ROTATION.items():
        if not pair.codes.intersection(codes):
            trainer, rollout = pair.facts[aspect]
            yield from pair.difference(
                aspect,
                severity="error",
                expected="the same on both sides, as in the checkpoint's config.json",
                why="The rollout samples from a model that attends to other distances than the trained one. Nothing "
                "fails: logprobs differ more with every position, and training learns the difference.",
                fix=f"set both to the value of config.json: {trainer.value} or {rollout.value}",
            )


@pair_rule("sides-round-differently")
def activations_differ(pair: Pair) -> Iterator[Finding]:
    trainer, rollout = pair.facts["activations"]
    residuals = trainer.value.startswith(rollout.value)  # the same products, other sums
    return pair.difference(
        "activations",
        expected="one dtype for products and for residuals",
        why="Under autocast the trainer adds its layers in fp32, while the rollout rounds every sum to 16 bits."
        if residuals
        else "bf16 keeps 8 bits of a number and fp16 keeps 11, so every product differs, not only its last bit.",
        fix="load the policy in bf16 (model_init_kwargs: dtype bfloat16), with fp32 copies in the optimizer"
        if residuals
        else f"{trainer.value} in both, or {rollout.value} in both",
        severity=pair.mild if residuals else "warning",
    )


@pair_rule("sides-round-differently")
def routers_differ(pair: Pair) -> Iterator[Finding]:
    return pair.difference(
        "router",
        expected="one precision of the router's logits",
        why="Logits of experts that are close together swap places when they are rounded. One swapped expert changes a "
        "token by far more than any other rounding: about 10% of choices differ in a forward.",
        fix=("replay the rollout's routing in the trainer", "or give the trainer's router the rollout's precision"),
    )


@pair_rule("sides-round-differently")
def heads_differ(pair: Pair) -> Iterator[Finding]:
    return pair.difference(
        "head",
        "logits of the head",
        expected="logits in fp32 on both sides",
        why="A logit rounded to bf16 is off by up to 1 in 256 of its size, about 0.06 at a logit of 20, and so is the "
        "logprob. With fp32 heads the sides' probabilities correlate far better (MiniMax-M1: 0.99, not 0.9).",
        fix="cast_lm_head_to_fp32 (TRL), or fp32 logits in the trainer's loss"
        if pair.facts["head"][1].value == "fp32"
        else '--enable-fp32-lm-head (SGLang), or --hf-overrides \'{"head_dtype": "float32"}\' (vLLM)',
    )


@pair_rule("sides-round-differently")
def cos_and_sin_differ(pair: Pair) -> Iterator[Finding]:
    return pair.difference(
        "cos and sin",
        expected="one precision of cos and sin",
        why="One side multiplies q and k by cos and sin in fp32, the other rounds them to 16 bits first: every rotated "
        "channel differs in its last bits, on all positions.",
        fix="apply_rope_fusion=False: the unfused rotation rounds them, as the rollout does"
        if pair.facts["cos and sin"][0].value == "fp32"
        else "apply_rope_fusion, if the trainer is Megatron: TransformerEngine's kernel keeps them in fp32",
    )


@pair_rule("rollout-quantised")
def rollout_is_quantised(pair: Pair) -> Iterator[Finding]:
    trainer, rollout = pair.facts["weights"]
    if rollout.value in ("", "16 bits") or rollout.value == trainer.value:
        return
    correction = pair.correction
    yield Finding(
        where=pair.where("weights"),
        found=f"weights: {pair.sides('weights')}",
        expected="a correction of the loss for the rollout's own probabilities, or both sides in one format",
        why="Every matrix of the rollout is rounded to 8 bits or less and the trainer's are not, so tokens are sampled "
        "from another policy. FP8 rollouts without a correction cost 3 to 10% of the reward (Jet-RL)"
        + (f"; here {correction} corrects it." if correction else "."),
        fix="nothing to do: watch the difference of logprobs"
        if correction
        else "truncated importance sampling: " + _correction_of(pair),
        severity="note" if correction and not pair.is_exact else "warning",
    )


def _correction_of(pair: Pair) -> str:
    """Return the setting that corrects the loss in the trainer's framework."""
    settings = {
        "verl": "algorithm.rollout_correction.rollout_is=token",
        "slime": "--use-tis",
        "vime": "--use-tis",
        "nemo-rl": "loss_fn.use_importance_sampling_correction=true",
        "trl": "vllm_importance_sampling_correction=true",
    }
    return settings.get(pair.trainer.scope.partition(" ")[0], "the trainer's own setting")


@pair_rule("rollout-quantised")
def cache_is_quantised(pair: Pair) -> Iterator[Finding]:
    return pair.difference(
        "KV cache",
        expected="keys and values in 16 bits, or a correction of the loss",
        why="The rollout attends to keys and values rounded to 8 bits; the trainer's are not, so logprobs differ more "
        "the longer the sequence is.",
        fix="leave --kv-cache-dtype out",
    )


@pair_rule("logprobs-mean-different-things")
def truncated_sampling(pair: Pair) -> Iterator[Finding]:
    cut = {key: value for key, value in sampling(pair.rollout).items() if key != "temperature"}
    trainer, rollout = pair.facts["logprobs"]
    if cut and rollout.value == "processed" and not trainer.value.endswith("kept tokens"):
        settings = ", ".join(f"{key} {value:g}" for key, value in cut.items())
        yield Finding(
            where=pair.rollout.where(next(iter(cut))),
            found=f"{settings}; logprobs: {pair.sides('logprobs')}",
            expected="sampling from the whole vocabulary: top_p 1, top_k off, min_p 0, no penalty",
            why="The rollout's logprobs are normalised over the tokens that were kept, the trainer's over all. Their "
            "ratio carries the kept probability mass at every token, even for equal weights (vllm-project/vllm#42259, "
            "huggingface/trl#6789, verl-project/verl#6240).",
            fix=("top_p=1, top_k=-1 and min_p=0 for rollouts", "or a trainer that applies the same filter (NeMo-RL)"),
            severity="warning",
        )


@pair_rule("logprobs-mean-different-things")
def raw_logprobs(pair: Pair) -> Iterator[Finding]:
    trainer, rollout = pair.facts["logprobs"]
    temperature = sampling(pair.rollout).get("temperature")
    if rollout.value == "raw" and temperature is not None and trainer.value.startswith("divided"):
        yield Finding(
            where=pair.rollout.where("temperature"),
            found=f"temperature {temperature:g}; logprobs: {pair.sides('logprobs')}",
            expected="--logprobs-mode processed_logprobs",
            why="vLLM's raw logprobs are taken before the temperature, and the trainer divides its logits by it: the "
            "two are probabilities of different distributions (vllm-project/vllm#42259, vllm-project/vime#69).",
            severity="warning",
        )


@pair_rule("stale-prefix-cache")
def cache_outlives_weights(pair: Pair) -> Iterator[Finding]:
    job, is_on = pair.trainer.scope.partition(" ")[0], pair.facts["prefix cache"][1].value == "on"
    in_flight = pair.trainer.on("in_flight_weight_updates")
    is_kept = in_flight and not pair.trainer.on("recompute_kv_cache_after_weight_updates")
    if job == "nemo-rl" and pair.rollout.framework == "vllm" and is_on and is_kept:
        yield Finding(
            where=pair.trainer.where("in_flight_weight_updates"),
            found="in_flight_weight_updates with the prefix cache, recompute_kv_cache_after_weight_updates off",
            expected="recompute_kv_cache_after_weight_updates: true, or no prefix cache",
            why="The prefix cache then survives every update: later requests read keys and values of weights up to 17 "
            "updates old, and the difference of logprobs grows until the engine restarts (NVIDIA-NeMo/RL#4018, open "
            "in September 2026).",
            fix=("grpo.async_grpo.recompute_kv_cache_after_weight_updates=true", "or enable_prefix_caching: false"),
            severity="warning",
        )
    elif is_on and job not in RESETS and pair.rollout.framework in ("vllm", "sglang"):
        yield Finding(
            where=pair.facts["prefix cache"][1].because,
            found="a prefix cache in the rollout, and nothing here that empties it when weights change",
            expected="a reset with every update of the weights",
            why="vLLM keeps cached keys and values across an update on purpose (vllm-project/vllm#46125): a request "
            "that shares a prefix then mixes two policies.",
            fix="POST /reset_prefix_cache (vLLM) or /flush_cache (SGLang) after each update",
            severity="note",
        )


@pair_rule("sides-sum-differently")
def ranks_differ(pair: Pair) -> Iterator[Finding]:
    return pair.difference(
        "tensor parallel",
        "ranks of tensor parallelism",
        expected="the same number on both sides, where equal bits matter",
        why="A row of a split matmul is a sum over ranks, so another number of ranks adds the same products in another "
        "order and rounds at other places. No engine but TBIK's makes that equal.",
        fix="the same tensor parallel size on both sides",
    )


@pair_rule("sides-sum-differently")
def one_side_promises(pair: Pair) -> Iterator[Finding]:
    trainer, rollout = pair.facts["batch invariance"]
    if pair.differs("batch invariance"):
        has, lacks = ("rollout", "trainer") if rollout.value == "yes" else ("trainer", "rollout")
        yield Finding(
            where=(rollout if has == "rollout" else trainer).because,
            found=f"equal bits in any batch are asked of the {has} only",
            expected="the same kernels on both sides",
            why=f"The {has} then agrees with itself in every batch, and still not with the {lacks}: its matmuls, norms "
            "and attention cut their sums at other places. Invariance is half of equality.",
            fix=_same_kernels(pair),
            severity=pair.mild,
        )


def _same_kernels(pair: Pair) -> tuple[str, ...]:
    engine = {
        "sglang": "a trainer with SGLang's kernels (slime's true on-policy mode)",
        "vllm": "torchtitan's or verl's trainer with vLLM's batch-invariant kernels",
    }.get(pair.rollout.framework, "a trainer and an engine of one house")
    return (engine, "or a correction of the loss, where the aim is only that a run can be repeated")


@pair_rule("sides-sum-differently")
def prompts_are_cut(pair: Pair) -> Iterator[Finding]:
    rollout = pair.facts["prompts"][1]
    if pair.is_exact and rollout.value == "in chunks" and pair.rollout.framework in ("vllm", "sglang"):
        yield Finding(
            where=rollout.because,
            found="prompts are computed in chunks, and the trainer computes them whole",
            expected="whole prompts, or a test that cuts them at every place",
            why="Attention of a later chunk reads its earlier keys from the cache and may fold them in another order; "
            "layers with a recurrent state start a chunk where the cut is. The engines' tests cover few cuts.",
            fix="--no-enable-chunked-prefill (vLLM), or --chunked-prefill-size -1 (SGLang)",
            severity="warning" if pair.codes.intersection(("zero-mismatch-refused",)) else "note",
        )


@pair_rule("routing-not-replayed")
def experts_are_chosen_twice(pair: Pair) -> Iterator[Finding]:
    is_moe = has_experts(pair.trainer) or has_experts(pair.rollout)
    both = all(fact.value == "yes" for fact in pair.facts["batch invariance"])
    if is_moe and not both and not pair.is_replayed:
        yield Finding(
            where=pair.where("router"),
            found="a model with experts, whose choices are computed again in the trainer",
            expected="the rollout's choices, replayed in the trainer",
            why="About one choice in ten differs between two engines in a forward, and each changes its token as no "
            "rounding does. Without replay, runs on Qwen3-30B-A3B collapsed (NVIDIA/Megatron-LM#4168).",
            fix="routing replay (R3): --use-rollout-routing-replay (slime), enable_rollout_routing_replay (verl), "
            "trainer.enable_router_replay (prime-rl)",
            severity="note",
        )


@pair_rule("replay-with-offload")
def replay_cannot_offload(pair: Pair) -> Iterator[Finding]:
    offload = next((s for s in pair.rollout.inputs.settings if "kv_cache_offload" in s.path), None)
    if pair.is_replayed and offload is not None:
        yield Finding(
            where=f"{offload.where} ({offload.path})",
            found="routing replay with a KV cache that is offloaded",
            expected="one of the two",
            why="Blocks that come back from the CPU have no routing with them, so prime-rl refuses the job "
            "(docs/inference.md of prime-rl).",
            fix=("remove inference.kv_cache_offload", "or trainer.enable_router_replay=false"),
        )
