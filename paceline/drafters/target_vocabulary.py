"""The target's own token embedding and output head, for drafters that share them.

Responsible for finding both in the target's directory. Knows no drafter; called when one is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafters.checkpoint import CheckpointError
from paceline.target.weights import SafetensorsDir


def read_vocabulary(target_dir: Path, vocab: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding and head, each `[vocab, width]` in `dtype`; the same tensor where the target ties them.

    Raises:
        CheckpointError: the target's have another shape.
    """
    is_tied = bool(json.loads((target_dir / "config.json").read_text()).get("tie_word_embeddings", False))
    with SafetensorsDir(target_dir) as weights:
        embedding = weights.get("model.embed_tokens.weight", dtype)
        # Some classes tie by default and leave the switch out; without a head of its own there is no other way.
        is_tied = is_tied or "lm_head.weight" not in weights
        head = embedding if is_tied else weights.get("lm_head.weight", dtype)
    for name, tensor in (("embedding", embedding), ("head", head)):
        if tuple(tensor.shape) != (vocab, width):
            raise CheckpointError(f"the target's {name} is {tuple(tensor.shape)}, not {(vocab, width)}")
    return embedding, head


def read_embedding(target_dir: Path, vocab: int, width: int, dtype: torch.dtype) -> Tensor:
    """The token embedding alone, `[vocab, width]` in `dtype`.

    Raises:
        CheckpointError: the target's has another shape.
    """
    with SafetensorsDir(target_dir) as weights:
        embedding = weights.get("model.embed_tokens.weight", dtype)
    if tuple(embedding.shape) != (vocab, width):
        raise CheckpointError(f"the target's embedding is {tuple(embedding.shape)}, not {(vocab, width)}")
    return embedding
