"""The target's own token embedding and output head, for drafters that share them.

Finds both in the target's directory, and reads which part of the vocabulary such a drafter proposes. At one row,
reading a head of 49,152 tokens takes longer than the rest of a small layer (frequency-ranked heads: Zhao et al.,
2502.14856). Called when a drafter is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.model.weights import SafetensorsDir

TOKEN_MAP = "token_map"
"""Tensor of a checkpoint that proposes a part of the vocabulary: the target's id of each draft id."""


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The embedding and the head that a drafter shares with its target.

    Attributes:
        embedding: `[target_vocab, hidden]`.
        head: `[draft_vocab, hidden]`, not yet packed for a device.
        draft_ids: int64 `[draft_vocab]`, the target's id of each row of the head; None where they are the same.
    """

    embedding: Tensor
    head: Tensor
    draft_ids: Tensor | None

    @property
    def size(self) -> int:
        """Draft ids."""
        return self.head.shape[0]

    @classmethod
    def read(
        cls,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        target_dir: Path,
        where: torch.device,
        dtype: torch.dtype,
    ) -> SharedVocabulary:
        """Read what a checkpoint shares; its own tensors include those of `map_shapes`. The head stays on the CPU.

        Raises:
            CheckpointError: the target's tensors have another shape, or the map does not name distinct tokens.
        """
        vocab = config.size("target_vocab")
        embedding, head = read_vocabulary(target_dir, vocab, config.size("hidden"), dtype)
        shapes = map_shapes(config)
        if not shapes:
            return cls(embedding.to(where), head, None)
        draft_ids = check_token_map(tensors[TOKEN_MAP], shapes[TOKEN_MAP][0], vocab)
        return cls(embedding.to(where), head[draft_ids], draft_ids.to(where))


def map_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The map's shape by name, if `shape.draft_vocab` says that a part is proposed; else empty."""
    if not config.shape.get("draft_vocab"):
        return {}
    return {TOKEN_MAP: (config.size("draft_vocab"),)}


def check_token_map(token_map: Tensor, draft_vocab: int, target_vocab: int) -> Tensor:
    """A reduced vocabulary's target ids as int64 `[draft_vocab]`.

    Raises:
        CheckpointError: the map does not name distinct tokens of the target.
    """
    ids = token_map.to(torch.int64)
    is_map = (
        ids.shape == (draft_vocab,)
        and int(ids.min()) >= 0
        and int(ids.max()) < target_vocab
        and len(ids.unique()) == draft_vocab
    )
    if not is_map:
        raise CheckpointError(f"token_map does not name {draft_vocab} distinct ids below {target_vocab}")
    return ids


def read_draft_ids(config: DrafterConfig, offsets: Tensor, device: torch.device) -> Tensor | None:
    """Target id of each draft id, int64 `[draft_vocab]`; None where they are the same.

    Args:
        config: configuration of the checkpoint.
        offsets: `d2t`, `[draft_vocab]`: target id less draft id.
        device: where the ids are used.

    Raises:
        CheckpointError: the ids are not the target's, or not distinct.
    """
    vocab = config.size("target_vocab")
    ids = offsets.to(torch.int64) + torch.arange(offsets.shape[0])
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise CheckpointError("d2t does not map draft ids to distinct target ids")
    return None if len(ids) == vocab and not bool(offsets.any()) else ids.to(device)


def read_vocabulary(target_dir: Path, vocab: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding and head, each `[vocab, width]` in `dtype`; the same tensor where the target ties them.

    Raises:
        CheckpointError: the target's tensors have another shape.
    """
    is_tied = bool(json.loads((target_dir / "config.json").read_text()).get("tie_word_embeddings", False))
    with SafetensorsDir(target_dir) as weights:
        embedding = weights.get("model.embed_tokens.weight", dtype)
        # Some classes tie by default and leave the switch out; a file without a head can only be tied.
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
