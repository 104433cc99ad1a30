"""A random P-EAGLE checkpoint, and a slow reference of what it drafts: everything recomputed, no cache, no batch."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.p_eagle.objective import PEagleShape

MASK_TOKEN = 5


def random_tensors(shape: PEagleShape, draft_ids: list[int], seed: int) -> dict[str, Tensor]:
    """Weights by public name; strong branches and small features, so that what is drafted depends on everything."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        if len(size) == 1:
            tensors[name] = 1.0 + 0.2 * torch.randn(size, generator=random)
        elif name in ("embed_tokens.weight", "mask_hidden"):
            tensors[name] = torch.randn(size, generator=random)
        else:
            tensors[name] = torch.randn(size, generator=random) * 1.5 * size[1] ** -0.5
            tensors[name] *= 0.05 if name == "fc.weight" else 2.0 if "o_proj" in name else 1.0
    ids = torch.tensor(draft_ids)
    tensors["d2t"] = ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(shape.target_vocab, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save(
    path: Path,
    shape: PEagleShape,
    tensors: dict[str, Tensor],
    fingerprint: str,
    tap_layers: list[int],
    max_positions: int,
) -> Path:
    """Write the checkpoint."""
    sizes = {name: getattr(shape, name) for name in PEagleShape.__dataclass_fields__ if name != "num_taps"}
    sizes |= {"tap_layers": tap_layers, "max_positions": max_positions}
    save_drafter(path, DrafterConfig("p_eagle", fingerprint, "tiny", sizes), tensors)
    return path


def reference_logits(
    shape: PEagleShape, w: dict[str, Tensor], taps: Tensor, tokens: list[int], num_depths: int
) -> Tensor:
    """Draft logits of every depth behind a text, `[num_depths, draft_vocab]`: one causal pass over true and mask rows.

    Args:
        shape: sizes.
        w: weights.
        taps: of all positions but the last token's, `[n - 1, taps_width]`.
        tokens: `n` of them.
        num_depths: depths.
    """
    num_masks, count = num_depths - 1, len(tokens) - 1 + num_depths - 1
    features = torch.cat([taps, w["mask_hidden"].view(1, -1).expand(num_masks, -1)]) @ w["fc.weight"].T
    words = w["embed_tokens.weight"][torch.tensor([*tokens[1:], *[MASK_TOKEN] * num_masks])]
    positions = torch.arange(count)
    half = shape.head_dim // 2
    rate = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * rate)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + shape.rms_eps).rsqrt() * w[name]

    def turn(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * angle
        return torch.cat([turned.real, turned.imag], dim=-1).float()

    x = features
    for index in range(shape.num_layers):
        p = f"layers.{index}." if index else "midlayer."
        if index:
            a = norm(x, p + "input_layernorm.weight")
        else:
            parts = norm(words, p + "input_layernorm.weight"), norm(x, p + "hidden_norm.weight")
            a = torch.cat(parts, dim=-1)
        q, k, v = ((a @ w[p + f"self_attn.{n}_proj.weight"].T).view(count, -1, shape.head_dim) for n in "qkv")
        q, k = turn(q), turn(k)
        groups = shape.num_heads // shape.num_kv_heads
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(groups, 1)) / math.sqrt(shape.head_dim)
        scores = scores.masked_fill(positions[None, :] > positions[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", scores, v.repeat_interleave(groups, 1)).reshape(count, -1)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        m = norm(x, p + "post_attention_layernorm.weight")
        gated = F.silu(m @ w[p + "mlp.gate_proj.weight"].T) * (m @ w[p + "mlp.up_proj.weight"].T)
        x = x + gated @ w[p + "mlp.down_proj.weight"].T
    return norm(x[-num_depths:], "norm.weight") @ w["lm_head.weight"].T
