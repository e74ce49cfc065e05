"""Use whorl's operators in your own training loop: they are differentiable functions of tensors.

    python examples/train_with_operators.py --steps 30

A transformer of two layers learns to repeat a sequence that it has seen. On an NVIDIA GPU the Triton kernels run, on an
Ascend NPU those of torch_npu, on a CPU the reference; `ops.rope.choose(...)` returns which one and why.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl import ops
from whorl.device import default_device
from whorl.rope_table import get_rope

VOCAB, WIDTH, HEADS, HEAD_DIM, INNER = 32, 64, 4, 16, 128
LENGTH = 16  # tokens of the sequence that is repeated


class Layer(nn.Module):
    """Attention and a gated MLP, with whorl's norm, rotary embedding and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.rope = get_rope(head_dim=HEAD_DIM, base=1e4, max_position=2 * LENGTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(ops.rms_norm(x, self.norms[0])).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        q, k = ops.rope(q, k, self.rope.cos_sin(x.device), positions)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # The residual is added and normalised in one pass over memory.
        y, x = ops.add_rms_norm(self.out(mixed.transpose(1, 2).flatten(-2)), x, self.norms[1])
        return x + self.down(ops.glu(self.gate_up(y)))


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = default_device()
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        ids = torch.randint(VOCAB, (16, LENGTH), device=device).repeat(1, 2)
        logits = model(ids[:, :-1])
        second = slice(LENGTH - 1, None)  # only the repetition can be predicted
        loss = F.cross_entropy(logits[:, second].flatten(0, 1), ids[:, 1:][:, second].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
