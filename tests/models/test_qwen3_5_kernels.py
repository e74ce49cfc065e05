"""Qwen3.5 with Triton's kernels of the recurrence, in the interpreter: one arithmetic, close to the reference's."""

import contextlib
from collections.abc import Iterator

import torch
from one_sequence import Runner, close
from schedules import tiny

from whorl import nn, ops
from whorl.models.qwen3_5 import Qwen3_5Text

SIZES = {"num_hidden_layers": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TOKENS = [(7 * i + 3) % 89 + 1 for i in range(134)]


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    with ops.gated_delta.using("triton"), ops.gated_delta_lanes.using("triton"):
        yield


def test_decoded_equals_prefilled() -> None:
    """Behind a prompt that ends within a chunk, past the end of the chunk, and a draft that is rejected.

    Not in fp32: numpy, which multiplies in the interpreter, sums a row in an order that depends on the other rows.
    """
    model = tiny(Qwen3_5Text, torch.bfloat16, **SIZES)
    reference = Runner(model, 160).run(TOKENS)
    with kernels():
        whole, runner = Runner(model, 160).run(TOKENS), Runner(model, 160)
        parts = [runner.run(TOKENS[:64]), runner.run(TOKENS[64:120])]
        runner.run([*TOKENS[120:122], 5, 6, 7])
        runner.length = 122  # three drafted tokens are computed again
        parts += [whole[120:122], *(runner.run([token]) for token in TOKENS[122:])]
    assert torch.equal(torch.cat(parts), whole)
    close(whole, reference, 0.05)


def test_a_trainer_has_the_same_bits() -> None:
    model = tiny(Qwen3_5Text, torch.bfloat16, **SIZES)
    with kernels(), torch.no_grad():
        logits = Runner(model, 160).run(TOKENS)[:-1]
        trained = model.logprobs(nn.pack([TOKENS], "cpu"))
        expected = ops.token_logprobs(logits, torch.tensor(TOKENS[1:]))
    assert torch.equal(trained, expected)
