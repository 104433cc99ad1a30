"""From the logits of a step to what each sequence commits.

The bridge between paceline.sampling, which knows no sequences, and the step loop. Pure but for the tensors it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.sampling import DraftDistribution, Verdict, VerifyMode, verify_step
from paceline.trie import DraftTree
from services.verifier.sequence import TargetSequence


def judge(
    sequences: Sequence[TargetSequence], trees: Sequence[DraftTree], logits: Sequence[Tensor]
) -> list[Verdict]:
    """Decide what each sequence accepts.

    Args:
        sequences: sequences with logits in this step.
        trees: the draft nodes each of them ran.
        logits: for each sequence `[1 + nodes, vocab]` float32: the root's row, then the nodes' rows.

    Returns:
        One verdict for each sequence, in order.
    """
    return verify_step(
        logits[0] if len(logits) == 1 else torch.cat(list(logits)),
        [_with_distributions(sequence, tree) for sequence, tree in zip(sequences, trees, strict=True)],
        [sequence.committed_length for sequence in sequences],
        [sequence.spec.sampling for sequence in sequences],
    )


def _with_distributions(sequence: TargetSequence, tree: DraftTree) -> DraftTree:
    """The tree with one-hot draft distributions where rejection sampling asks for them.

    A drafter's token is a function of the prefix and of noise in another role than the acceptance draws, so that the
    distribution it was drawn from, given the prefix, is a point mass: nothing but ids need travel, and the law of the
    text stays the target's (Leviathan et al., 2211.17192, section 2.3 with q one-hot).
    """
    if sequence.spec.sampling.resolved_mode is not VerifyMode.REJECTION:
        return tree
    return replace(tree, draft_dists=tuple(DraftDistribution.point_mass(token) for token in tree.tokens))
