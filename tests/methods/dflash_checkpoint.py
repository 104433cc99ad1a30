"""A random DFlash checkpoint, and a slow reference of what it drafts: everything recomputed, no cache, no batch."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.block_diffusion.objective import DFlashShape
from paceline.methods.checkpoint import DrafterConfig, save_drafter

MASK_TOKEN = 5


def random_tensors(shape: DFlashShape, draft_ids: list[int], seed: int) -> dict[str, Tensor]:
    """Weights by public name; strong branches and small features, so that what is drafted depends on everything."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.2 * torch.randn(size, generator=random)
        else:
            tensors[name] = torch.randn(size, generator=random) * 1.5 * size[-1] ** -0.5
            tensors[name] *= 0.05 if name == "fc.weight" else 2.0 if "o_proj" in name else 1.0
    ids = torch.tensor(draft_ids)
    tensors["d2t"] = ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(shape.target_vocab, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save(
    path: Path,
    shape: DFlashShape,
    tensors: dict[str, Tensor],
    fingerprint: str,
    tap_layers: list[int],
    max_positions: int,
    method: str = "dflash",
    **more: object,
) -> Path:
    """Write the checkpoint."""
    sizes = {k: v for k, v in asdict(shape).items() if k != "num_taps"}
    sizes |= {"tap_layers": tap_layers, "max_positions": max_positions, **more}
    save_drafter(path, DrafterConfig(method, fingerprint, "tiny", sizes), tensors)
    return path


def reference_states(
    shape: DFlashShape, w: dict[str, Tensor], embedding: Tensor, taps: Tensor, tokens: list[int]
) -> Tensor:
    """Final-norm outputs of the rows that propose, `[num_drafts, hidden]`: the published rule, row by row.

    Args:
        shape: sizes.
        w: weights.
        embedding: the target's.
        taps: of all positions but the last token's, `[n - 1, taps_width]`.
        tokens: `n` of them.
    """
    start, size, half = len(tokens) - 1, shape.block_size, shape.head_dim // 2
    rate = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + shape.rms_eps).rsqrt() * w[name]

    def turn(x: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + x.shape[0])
        angle = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * rate)[:, None]
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * angle
        return torch.cat([turned.real, turned.imag], dim=-1).float()

    context = norm(taps @ w["fc.weight"].T, "hidden_norm.weight")
    x = embedding[torch.tensor([tokens[-1], *[shape.mask_token] * (size - 1)])]
    groups = shape.num_heads // shape.num_kv_heads
    for index in range(shape.num_layers):
        p = f"layers.{index}."
        a = norm(x, p + "input_layernorm.weight")
        q = (a @ w[p + "self_attn.q_proj.weight"].T).view(size, -1, shape.head_dim)
        both = torch.cat([context, a])
        k, v = (
            (both @ w[p + f"self_attn.{n}_proj.weight"].T).unflatten(1, (-1, shape.head_dim)) for n in "kv"
        )
        if shape.head_norms:
            q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
        q, k = turn(q, start), turn(k, 0)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(shape.head_dim)).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", scores, v).reshape(size, -1)
        x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
        m = norm(x, p + "post_attention_layernorm.weight")
        gated = F.silu(m @ w[p + "mlp.gate_proj.weight"].T) * (m @ w[p + "mlp.up_proj.weight"].T)
        x = x + gated @ w[p + "mlp.down_proj.weight"].T
    return norm(x[size - shape.num_drafts :], "norm.weight")
