"""The blocks of a text that a block drafter learns from: anchors, labels, weights of the loss, and attention.

Pure functions. Called by :mod:`paceline.methods.block_diffusion.objective`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training.data import Batch


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a batch. All texts have equally many; missing ones have weight 0.

    Attributes:
        anchors: int64 ``[texts, blocks]``, position of each block's first row.
        labels: int64 ``[texts, blocks, drafts]``, the text's token at the place of each proposal; 0 past the end.
        places: int64 ``[texts, blocks, drafts]``, the position where the target chose that token, one before it.
        weights: float32 ``[texts, blocks, drafts]``, of each proposal's loss; 0 where there is none.
    """

    anchors: Tensor
    labels: Tensor
    places: Tensor
    weights: Tensor


def can_anchor(batch: Batch) -> Tensor:
    """Positions that may be anchors, bool ``[texts, length]``: in an answer, as the next token is; never the first."""
    able = batch.is_answer[:, :-1] & batch.is_answer[:, 1:]
    able = torch.cat([able, torch.zeros_like(able[:, :1])], dim=1)
    able[:, 0] = False
    return able


def sample_anchors(able: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Up to ``count`` positions of each text, drawn without replacement, ascending.

    Args:
        able: bool ``[texts, length]``.
        count: anchors of a text at most.

    Returns:
        Int64 ``[texts, n]``, with ``n`` the most that any text has, and bool ``[texts, n]``: which of them are real.
    """
    most = max(1, min(count, int(able.sum(1).max())))
    keys = torch.where(able, torch.rand(able.shape), -1.0)
    best = keys.topk(most, dim=1)
    # Those that are not real sort after the others, and get position 0.
    ordered = torch.where(best.values >= 0, best.indices, able.shape[1]).sort(dim=1).values
    real = ordered < able.shape[1]
    return ordered.where(real, 0), real


def make_blocks(
    batch: Batch, anchors: Tensor, real: Tensor, num_drafts: int, decay: float, has_label: Tensor
) -> Blocks:
    """Labels and weights of blocks.

    A proposal counts if all tokens from the anchor to its own belong to the answer, and its token can be drafted. The
    proposal ``k`` places after the first has weight ``exp(-k / decay)`` (2602.06036, section 3.3).

    Args:
        batch: texts.
        anchors: int64 ``[texts, blocks]``.
        real: bool ``[texts, blocks]``.
        num_drafts: proposals of a block; the first is for the token after the anchor, in either layout.
        decay: the published gamma.
        has_label: bool ``[target_vocab]``: tokens that can be drafted.
    """
    length = batch.tokens.shape[1]
    ahead = torch.arange(1, num_drafts + 1)
    at = anchors[..., None] + ahead  # [texts, blocks, drafts], positions of the tokens
    is_inside = at < length
    at = at.clamp_max(length - 1)
    rows = torch.arange(batch.tokens.shape[0])[:, None, None]
    labels = batch.tokens[rows, at]
    is_unbroken = (batch.is_answer[rows, at] & is_inside & real[..., None]).int().cumprod(-1).bool()
    weights = torch.exp(-(ahead - 1) / decay) * (is_unbroken & has_label[labels])
    return Blocks(anchors, labels.where(is_inside, 0), at - 1, weights)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, context_keys: Tensor, context_values: Tensor, is_before: Tensor
) -> Tensor:
    """What rows of blocks read: the context before their anchor, and every row of their own block.

    Args:
        q: ``[texts, rows, heads, head_dim]``, scaled; the rows of a block stand side by side.
        k: ``[texts, rows, kv_heads, head_dim]``.
        v: as ``k``.
        context_keys: ``[texts, length, kv_heads, head_dim]``.
        context_values: as ``context_keys``.
        is_before: bool ``[texts, blocks, length]``: positions before each block's anchor.

    Returns:
        ``[texts, rows, heads * head_dim]``.
    """
    num_blocks, length = is_before.shape[1:]
    block_size = q.shape[1] // num_blocks
    is_hidden = is_before.logical_not().repeat_interleave(block_size, dim=1)[:, None, None]
    query = q.unflatten(2, (k.shape[2], -1))  # [texts, rows, kv_heads, group, head_dim]
    block_query, block_keys, block_values = (x.unflatten(1, (num_blocks, -1)) for x in (query, k, v))
    before = torch.einsum("trkgd,tlkd->tkgrl", query, context_keys).masked_fill(is_hidden, -torch.inf)
    inside = torch.einsum("tbikgd,tbjkd->tkgbij", block_query, block_keys).flatten(3, 4)
    weights = torch.cat([before, inside], dim=-1).softmax(-1)
    of_block = weights[..., length:].unflatten(3, (num_blocks, -1))
    mixed = torch.einsum("tkgrl,tlkd->trkgd", weights[..., :length], context_values)
    mixed = mixed + torch.einsum("tkgbij,tbjkd->tbikgd", of_block, block_values).flatten(1, 2)
    return mixed.flatten(2)
