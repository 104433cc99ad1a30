"""From the logits of a step to what each sequence commits.

The bridge between paceline.sampling, which knows no sequences, and the step loop. Pure but for the tensors it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import Verdict, verify_step
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
    for sequence, tree, rows in zip(sequences, trees, logits, strict=True):
        for rule in sequence.rules:
            rule.apply(rows, tree)
    return verify_step(
        logits[0] if len(logits) == 1 else torch.cat(list(logits)),
        trees,
        [sequence.committed_length for sequence in sequences],
        [sequence.spec.sampling for sequence in sequences],
    )
