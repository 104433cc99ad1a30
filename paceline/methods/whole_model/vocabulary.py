"""How the vocabulary of a drafter's own model relates to the target's.

It says which of the model's tokens may be drafted, which target token each of them is, and what the model reads for a
target's text. There are three kinds: the target's own vocabulary; a part of it (`d2t` in the checkpoint); and another
tokenizer's (a `tokenizer.json` that is not the target's), of which the common tokens are drafted. Called by the
independent drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import structlog
import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensor
from paceline.methods.whole_model.draft_text import DraftText, SameText, TranslatedText, Translation
from paceline.methods.whole_model.intersection import Intersection, TokenizerFile, intersect

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a drafter may propose.

    Attributes:
        own_ids: the drafter's ids of these tokens, int64 `[draft_vocab]`, ascending; None for all its ids.
        target_ids: the target's id of each, int64 `[draft_vocab]`, all different; None where the ids are the same.
        open_text: makes the empty text of a new sequence, in the form that the drafter's model reads.
    """

    own_ids: Tensor | None
    target_ids: Tensor | None
    open_text: Callable[[], DraftText]

    def own_of(self) -> dict[int, int] | None:
        """The drafter's id of each target id that it may propose; None where they are the same."""
        if self.own_ids is None or self.target_ids is None:
            return None
        if torch.equal(self.own_ids, self.target_ids):
            return None
        return dict(zip(self.target_ids.tolist(), self.own_ids.tolist(), strict=True))

    @classmethod
    def whole(cls, vocab: int) -> DraftVocabulary:
        """The target's vocabulary."""
        return cls(None, None, lambda: SameText(vocab))

    @classmethod
    def part(cls, ids: Sequence[int] | Tensor, vocab: int) -> DraftVocabulary:
        """Some of the target's tokens, by ascending id, of a model with `vocab` embeddings."""
        kept = torch.as_tensor(ids, dtype=torch.int64)
        return cls(kept, kept, lambda: SameText(vocab))

    @classmethod
    def read(
        cls, directory: Path, model_dir: Path, config: DrafterConfig, target_dir: Path, own_vocab: int
    ) -> DraftVocabulary:
        """Read the vocabulary of a checkpoint.

        Args:
            directory: the checkpoint.
            model_dir: its model.
            config: its configuration; `shape.draft_vocab` says that a part is drafted, and how many tokens.
            target_dir: the target.
            own_vocab: ids of the drafter's model.

        Raises:
            CheckpointError: the checkpoint contradicts itself, or has no token in common with the target.
        """
        target_vocab = (
            config.size("target_vocab") if "target_vocab" in config.shape else _vocab_of(target_dir)
        )
        own, target = TokenizerFile.find(directory, model_dir), TokenizerFile.find(target_dir)
        is_foreign = own is not None and own != target
        if config.shape.get("draft_vocab"):
            if is_foreign or own_vocab != target_vocab:
                raise CheckpointError(
                    "shape.draft_vocab picks from the target's vocabulary, and the drafter has another"
                )
            return cls.part(_draft_ids(directory, config.size("draft_vocab"), target_vocab), own_vocab)
        if own is not None and is_foreign:
            if target is None:
                raise CheckpointError(
                    f"target {target_dir.name!r} has no tokenizer.json to compare the drafter's with"
                )
            shared, translation = _translation(target, own, target_vocab, own_vocab)
            log.info(
                "the drafter has a tokenizer of its own",
                num_common=len(shared.own_ids),
                num_own=own_vocab,
                num_target=target_vocab,
            )
            return cls(
                torch.tensor(shared.own_ids),
                torch.tensor(shared.target_ids),
                lambda: TranslatedText(translation),
            )
        if own_vocab == target_vocab:
            return cls.whole(own_vocab)
        if own is None:
            raise CheckpointError(
                f"the drafter's vocabulary has {own_vocab} tokens, not {target_vocab}, and no tokenizer.json says how "
                "they relate"
            )
        # One tokenizer, and heads that were padded differently: ids past it have no meaning in either.
        return cls.part(range(min(own_vocab, target_vocab, own.load().get_vocab_size())), own_vocab)


@lru_cache(maxsize=8)
def _translation(
    target: TokenizerFile, own: TokenizerFile, target_vocab: int, own_vocab: int
) -> tuple[Intersection, Translation]:
    """The common tokens of two tokenizers and the mapping between them; cached for each pair."""
    target_tokenizer, own_tokenizer = target.load(), own.load()
    shared = intersect(target_tokenizer, own_tokenizer, target_vocab, own_vocab)
    return shared, Translation(target_tokenizer, own_tokenizer, shared, own_vocab)


def _vocab_of(model_dir: Path) -> int:
    """Ids of a model's head, from its transformers configuration."""
    content = json.loads((model_dir / "config.json").read_text())
    size = content.get("vocab_size", content.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(f"target {model_dir.name!r}: config.json has no vocab_size")
    return size


def _draft_ids(directory: Path, size: int, vocab: int) -> Tensor:
    """Ids from `d2t` (id of the target less place in the list, as in EAGLE-3's checkpoints)."""
    offsets = load_tensor(directory, "d2t").to(torch.int64)
    if tuple(offsets.shape) != (size,):
        raise CheckpointError(f"{directory.name!r}: d2t has shape {tuple(offsets.shape)}, not {(size,)}")
    ids = offsets + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
        raise CheckpointError("d2t does not map draft ids to rising target ids")
    return ids
