"""The layers of EAGLE-1 and EAGLE-3 by their published tensor names, on transformers' parts; slow, without a cache.

What the code under test is compared with. `state_dict` of each gives the tensors of a public checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


def _causal(n: int) -> Tensor:
    return torch.full((n, n), -torch.inf).triu(1)[None, None]


class ReferenceEagle1(nn.Module):
    """`fc`, and one Llama layer whose input norm is left out; no final norm."""

    def __init__(self, config: LlamaConfig, fc_bias: bool = True) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.fc = nn.Linear(2 * d, d, bias=fc_bias)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotary = [LlamaRotaryEmbedding(config)]  # in a list: it is no part of the state

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """`[n]` token r + 1 and `[n, d]` feature r of each row to `[n, d]` predicted features."""
        x = self.fc(torch.cat([self.embed_tokens(tokens), features], dim=-1))[None]
        positions = torch.arange(len(tokens))[None]
        out = self.layers[0](
            x,
            attention_mask=_causal(len(tokens)),
            position_embeddings=self.rotary[0](x, positions),
            position_ids=positions,
        )
        return out[0] if out.ndim == 3 else out


class ReferenceEagle3(nn.Module):
    """Features fused by `fc`, a layer that reads embedding and feature side by side, a norm and a head of its own."""

    def __init__(self, config: LlamaConfig, draft_vocab: int, num_taps: int = 3) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        d, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = nn.Embedding(vocab, d)
        self.fc = nn.Linear(num_taps * d, d, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        layer.hidden_norm = LlamaRMSNorm(d, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * d, width, bias=False))
        self.midlayer = layer
        self.norm = LlamaRMSNorm(d, config.rms_norm_eps)
        self.lm_head = nn.Linear(d, draft_vocab, bias=False)
        ids = torch.randperm(vocab)[:draft_vocab].sort().values
        self.register_buffer("d2t", ids - torch.arange(draft_vocab))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True))
        self.rotary = [LlamaRotaryEmbedding(config)]

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        """`[n]` token r + 1 and `[n, d]` fused feature or output r of each row to `[n, d]` outputs before the norm."""
        layer, positions = self.midlayer, torch.arange(len(tokens))[None]
        read = torch.cat(
            [layer.input_layernorm(self.embed_tokens(tokens)), layer.hidden_norm(states)], dim=-1
        )[None]
        mixed, _ = layer.self_attn(
            hidden_states=read,
            position_embeddings=self.rotary[0](read, positions),
            attention_mask=_causal(len(tokens)),
        )
        x = states + mixed[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))


def chain_logits(
    model: ReferenceEagle1 | ReferenceEagle3,
    head: nn.Module,
    features: Tensor,
    tokens: list[int],
    drafted: Sequence[int],
) -> Tensor:
    """What a drafter computes while it drafts these tokens: logits `[len(drafted) + 1, vocab]`, all anew for each.

    Args:
        model: the layer.
        head: from its outputs to logits.
        features: `[len(tokens) - 1, d]`, what its first rows read.
        tokens: committed.
        drafted: behind them.
    """  # fmt: skip
    states, logits = features, []
    with torch.no_grad():
        for count in range(len(drafted) + 1):
            words = torch.tensor([*tokens[1:], *drafted[:count]])
            out = model(words, states)
            logits.append(head(out[-1]))
            states = torch.cat([states, out[-1:]])
    return torch.stack(logits)
