"""Where PARD's training starts: the id whose row of the embedding becomes the mask token.

Called by the method's `recipe.py`. Knows nothing of the loss.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from paceline.methods.whole_model.intersection import TokenizerFile
from paceline.training.draft_vocabulary import rarest_token


def mask_token_for(model_dir: Path, counts: Tensor, embedding: Tensor) -> int:
    """The first row of the embedding without a token; if every row has one, the token whose loss costs least.

    Args:
        model_dir: the target, for its tokenizer.
        counts: how often each token occurs in the text, int64 ``[vocab]``.
        embedding: ``[vocab, hidden]``.
    """
    file = TokenizerFile.find(model_dir)
    if file is not None:
        ids = file.load().get_vocab(with_added_tokens=True).values()
        free = max(ids) + 1
        if free < embedding.shape[0]:
            return free
    return rarest_token(counts, embedding)
