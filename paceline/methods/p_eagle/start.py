"""Where P-EAGLE training starts: EAGLE-3's linear start in the fused layer, quiet layers above it, a typical mask.

Called by the method's `recipe.py`. Knows nothing of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.eagle3.start import Eagle3Start, starting_parameters
from paceline.methods.p_eagle.objective import PEagleShape
from paceline.training import shards
from paceline.training.data import Corpus


def rarest_token(counts: Tensor, embedding: Tensor) -> int:
    """The id to lend to the mask: least frequent in the text; of equals, the one with the shortest embedding.

    A token that the target hardly ever met has kept a short embedding, so that nothing is lost with its row.

    Args:
        counts: int64 ``[vocab]``.
        embedding: the target's ``[vocab, hidden]``.
    """
    lengths = embedding.float().norm(dim=-1)
    return int(torch.where(counts == counts.min(), lengths, torch.inf).argmin())


def mean_taps(corpus: Corpus) -> Tensor:
    """Mean of the taps over answers of some batches, float32 ``[taps_width]``."""
    total, count = torch.zeros(()), 0
    for _, batch in zip(range(8), corpus.epoch(0, shards.shard_indices(corpus.folder)[:1]), strict=False):
        taken = batch.need_taps()[batch.is_answer].float()
        total = total + taken.sum(0)
        count += taken.shape[0]
    if not count:
        raise TrainingDataError(f"{corpus.folder}: no answers to start from")
    return total / count


def p_eagle_start(
    shape: PEagleShape, start: Eagle3Start, taps: Tensor, target_head: Tensor, embedding: Tensor, seed: int
) -> dict[str, Tensor]:
    """Parameters that begin as the fitted linear drafter at depth 0, with an average position at the others.

    Args:
        shape: sizes; ``hidden`` must equal ``target_hidden``.
        start: from :func:`paceline.methods.eagle3.start.fit_linear`.
        taps: mean taps ``[taps_width]``: what ``mask_hidden`` begins as.
        target_head: the target's head rows of the draft vocabulary.
        embedding: the target's ``[vocab, hidden]``.
        seed: of the random matrices.
    """
    fused = starting_parameters(shape, start, target_head, seed)
    random = torch.Generator().manual_seed(seed + 1)
    parameters: dict[str, Tensor] = {}
    for name, size in shape.parameter_shapes().items():
        if not name.startswith("layers."):
            parameters[name] = fused[name]
        elif len(size) == 1:
            parameters[name] = torch.ones(size)
        else:
            parameters[name] = torch.randn(size, generator=random) * size[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                parameters[name] *= 0.1
    parameters["embed_tokens.weight"] = embedding.float()
    parameters["mask_hidden"] = (taps / start.tap_scale)[None, None]
    return parameters
