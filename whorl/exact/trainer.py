"""What a trainer calls: `install` on its model, and the log-probabilities of tokens as the engine computes them."""

from collections.abc import Sequence

from torch import Tensor, nn

from whorl import ops
from whorl.adapters.transformers import TransformersInstallation
from whorl.nn import pack, tempered

from . import titan, transformers


def install(model: nn.Module, *, max_length: int | None = None, tp_segments: int = 0) -> TransformersInstallation:
    """Make a model compute the bits of whorl's engine, in place, and return what was replaced; print it.

    model: of transformers (`whorl.exact.transformers.FAMILIES`) or of TorchTitan (`whorl.exact.titan.MODELS`).
    Parameters, state dict and optimizer stay as they are. Install before torch.compile; before or after FSDP2's
    `fully_shard` and activation checkpointing. max_length: the engine's max_model_len, which matters for rotations that
    depend on it (dynamic, longrope). tp_segments: the engine's setting of that name, for an engine with another degree
    of tensor parallelism than the trainer.
    The model then takes rows with padding on either side (attention_mask), rows whose position_ids restart, and
    cu_seq_lens_q. `uninstall()` of the result restores everything.
    Raises ValueError for a model, or a module in it, that is not known to compute the engine's bits, RuntimeError for a
    method that another library has replaced.

        installation = whorl.exact.install(model)
        logprobs = whorl.exact.token_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:])
    """
    framework = titan if titan.is_titan(model) else transformers
    return framework.install(model, max_length=max_length, tp_segments=tp_segments)


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token, fp32, with a gradient: the engine's bits, at a temperature those of its
    `processed_logprobs`.

    logits: [..., V], before each token; ids: [...]. torch's log_softmax and cross_entropy have other bits.
    """
    return ops.token_logprobs(tempered(logits, temperature), ids)  # type: ignore[no-any-return]


def sequence_logprobs(
    model: nn.Module, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """Return the log-probabilities of every token but the first of each sequence, one tensor for each.

    model: one that `install` has changed. The sequences are packed into one row.
    """
    device = next(model.parameters()).device
    packed = pack(sequences, device)
    inputs, positions = packed.token_ids[None], packed.positions[None]
    if titan.is_titan(model):
        logits = model(inputs, positions=positions)[0]
    else:
        logits = model(input_ids=inputs, position_ids=positions).logits[0]
    values = token_logprobs(logits[packed.scored - 1], packed.token_ids[packed.scored], temperature=temperature)
    return values.split([len(sequence) - 1 for sequence in sequences])
