"""DeepSeek-V3.2: latent attention over keys that a lightning indexer selects, mixture of experts, two training stages.

Continue with `attention.py` (projections), `core.py` and `fused.py` (the attention itself) and `stages.py`. Parameters
have the names of TorchTitan's DeepSeek-V3 where it has them, so that its parallelism, load balancing and converters
apply.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.moe import FeedForward
from torchtitan.models.utils import trunc_normal_
from torchtitan.protocols.train_spec import ModelProtocol

from .args import DeepSeekV32Args
from .attention import Attention
from .core import attach_loss, carry, new_log
from .loss import chunked_cross_entropy
from .moe import build_experts
from .stages import apply_stage

MTP_CHUNK = 512  # tokens whose multi-token prediction loss is computed at once


def cos_sin_table(args: DeepSeekV32Args, device: torch.device | str | None = None) -> Tensor:
    """Return the rotary table [max_seq_len, R] fp32: for each position R/2 cosines, then R/2 sines.

    They are multiplied by YaRN's attention factor, which is 1 in DeepSeek's configs.
    """
    device = device or torch.get_default_device()  # meta while TorchTitan builds a model
    rope = args.config.rope
    frequencies = torch.from_numpy(rope.frequencies()).to(device)
    angles = torch.arange(args.max_seq_len, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1) * rope.attention_factor


class TransformerBlock(nn.Module):
    """One layer: attention, then a mixture of experts, or a feed-forward network in the first n_dense_layers layers."""

    def __init__(self, layer_id: int, args: DeepSeekV32Args) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.moe_enabled = layer_id >= args.n_dense_layers
        if self.moe_enabled:
            self.moe = build_experts(args.moe_args, args.dim, args.moe_inter_dim, args.moe_impl)
        else:
            self.feed_forward = FeedForward(args.dim, args.inter_dim)
        self.weight_init_std = 0.02 / (2 * (layer_id + 1)) ** 0.5

    def forward(
        self, x: Tensor, cos_sin: Tensor, attention_masks: None = None, positions: Tensor | None = None
    ) -> Tensor:
        if self.attention.core.settings.stage == "warmup":
            return self._warm_up(x, cos_sin, positions)
        x = x + self.attention(self.attention_norm(x), cos_sin, attention_masks, positions)
        feed_forward = self.moe if self.moe_enabled else self.feed_forward
        return x + feed_forward(self.ffn_norm(x))

    def _warm_up(self, x: Tensor, cos_sin: Tensor, positions: Tensor | None) -> Tensor:
        """Compute the same as `forward`; backward reaches only this layer's indexer and those of the layers before."""
        attended = self.attention(self.attention_norm(x.detach()), cos_sin, None, positions)
        with torch.no_grad():
            h = x + attended
            if self.moe_enabled:
                h = h + self.moe(self.ffn_norm(h))
                self.moe.tokens_per_expert.zero_()  # without counts the expert biases, frozen as well, do not change
            else:
                h = h + self.feed_forward(self.ffn_norm(h))
        return carry(h, attended, x)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        self.attention.init_weights(self.weight_init_std, buffer_device)
        if self.moe_enabled:
            self.moe.init_weights(self.weight_init_std, buffer_device)
        else:
            self.feed_forward.init_weights(self.weight_init_std)


class MultiTokenPrediction(nn.Module):
    """An extra layer that predicts one token further ahead from the hidden state and the next known token.

    h: [B, S, C], the hidden states of the layer before. embedded: [B, S, C], the embeddings of the tokens that follow
    those in h. Returns hidden states [B, S, C], to which the model applies `norm`.
    """

    def __init__(self, layer_id: int, args: DeepSeekV32Args) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.hnorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.block = TransformerBlock(layer_id, args)
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, h: Tensor, embedded: Tensor, cos_sin: Tensor, positions: Tensor | None) -> Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(h)), -1)
        return self.block(self.eh_proj(joined), cos_sin, None, positions)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for norm in (self.enorm, self.hnorm, self.norm):
            norm.reset_parameters()
        trunc_normal_(self.eh_proj.weight, mean=0.0, std=0.02)
        self.block.init_weights(buffer_device)


class DeepSeekV32Model(ModelProtocol):
    """The model as TorchTitan builds it; a pipeline stage has some of the modules set to None."""

    cos_sin: Tensor

    def __init__(self, model_args: DeepSeekV32Args) -> None:
        super().__init__(model_args)
        args = self.model_args = model_args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.register_buffer("cos_sin", cos_sin_table(args), persistent=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(i, args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        after = range(args.n_layers, args.n_layers + args.n_mtp_layers)
        self.mtp = nn.ModuleDict({str(i): MultiTokenPrediction(n, args) for i, n in enumerate(after)})
        self.mtp_loss = new_log()  # accumulates this rank's share of the multi-token prediction loss
        apply_stage(self, args.stage)

    def forward(self, tokens: Tensor, attention_masks: None = None, positions: Tensor | None = None) -> Tensor:
        """Return the logits [B, S, V] of tokens [B, S]; positions: [B, S], if they are not 0, 1, ..., S - 1.

        A pipeline stage without the embedding takes hidden states [B, S, C]; one without the head returns them.
        """
        if attention_masks is not None:
            raise ValueError("DeepSeek-V3.2: attention_masks is not None, expected None: the indexer makes the mask")
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.cos_sin, None, positions)
        h = self.norm(h) if self.norm is not None else h
        out = self.output(h) if self.output is not None else h
        if len(self.mtp) and torch.is_grad_enabled():
            return self._add_mtp_loss(out, h, tokens, positions)
        return out

    def _add_mtp_loss(self, logits: Tensor, h: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the logits unchanged; their backward also starts that of the multi-token prediction loss.

        Layer `depth` predicts the token depth + 1 positions ahead; the last depth + 1 positions have no label. In
        warm-up there is no such loss, and backward only has to reach the indexers of these layers.
        """
        args, total = self.model_args, logits.new_zeros(1, dtype=torch.float32)
        layer: Any
        for depth, layer in enumerate(self.mtp.values(), 1):
            h = layer(h, self.tok_embeddings(tokens.roll(-depth, 1)), self.cos_sin, positions)
            if args.stage == "warmup":
                logits = carry(logits, logits, h)
                continue
            labels = tokens.roll(-depth - 1, 1).clone()
            labels[:, -depth - 1 :] = IGNORE_INDEX
            mtp_logits = self.output(layer.norm(h))
            total = total + chunked_cross_entropy(mtp_logits, labels, chunk=MTP_CHUNK)
        if args.stage == "warmup" or not args.mtp_loss_coeff:
            return logits
        factor = args.mtp_loss_coeff / len(self.mtp) / (args.global_tokens or tokens.numel())
        return attach_loss(logits, total * factor, self.mtp_loss)

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        device = buffer_device or self.cos_sin.device
        self.cos_sin = cos_sin_table(self.model_args, device)
        self.mtp_loss = new_log(device)
        if self.tok_embeddings is not None:
            nn.init.normal_(self.tok_embeddings.weight)
        layer: Any
        for layer in (*self.layers.values(), *self.mtp.values()):
            layer.init_weights(device)
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.output is not None:
            std = self.model_args.dim**-0.5
            trunc_normal_(self.output.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
