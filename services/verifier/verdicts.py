"""From the logits of a step to what each sequence commits.

The bridge between paceline.sampling, which knows no sequences, and the step loop. Pure but for the tensors it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import (
    DraftDistribution,
    RowParams,
    Verdict,
    VerifyMode,
    target_choices,
    target_probs,
    verify_chain_rejection,
    walk,
)
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
    sizes = [int(rows.shape[0]) for rows in logits]
    flat = logits[0] if len(logits) == 1 else torch.cat(list(logits))
    if all(sequence.spec.sampling.is_greedy for sequence in sequences):
        choices = flat.argmax(dim=-1).tolist()
    else:
        params = [sequence.spec.sampling for sequence in sequences]
        rows = RowParams.build(params, sizes, device=flat.device)
        choices = target_choices(flat, _positions(sequences, trees), rows).tolist()
    verdicts, offset = [], 0
    for sequence, tree, rows_of_sequence, size in zip(sequences, trees, logits, sizes, strict=True):
        if sequence.spec.sampling.resolved_mode is VerifyMode.REJECTION:
            verdicts.append(_reject(sequence, tree, rows_of_sequence))
        else:
            verdicts.append(walk(tree, choices[offset : offset + size]))
        offset += size
    return verdicts


def _positions(sequences: Sequence[TargetSequence], trees: Sequence[DraftTree]) -> list[int]:
    """Absolute position of the token that each row chooses."""
    positions = []
    for sequence, tree in zip(sequences, trees, strict=True):
        length = sequence.committed_length
        positions.append(length)
        positions.extend(length + depth for depth in tree.depths)
    return positions


def _reject(sequence: TargetSequence, tree: DraftTree, logits: Tensor) -> Verdict:
    """Chain rejection with one-hot draft distributions.

    A drafter's token is a function of the prefix and of noise in another role than the acceptance draws, so that the
    distribution it "was drawn from", given the prefix, is a point mass: nothing but ids need travel, and the law of
    the text stays the target's (Leviathan et al., 2211.17192, section 2.3 with q one-hot).
    """
    sampling = sequence.spec.sampling
    rows = RowParams.build([sampling], [int(logits.shape[0])], device=logits.device)
    return verify_chain_rejection(
        tree.tokens,
        [DraftDistribution.point_mass(token) for token in tree.tokens],
        target_probs(logits, rows),
        sampling.seed,
        sequence.committed_length,
    )
