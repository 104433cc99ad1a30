"""From the logits of a step to what each sequence commits.

The bridge between paceline.sampling, which knows no sequences, and the step loop. Pure but for the tensors it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import RuleError, Verdict, maxima_of, verify_step
from paceline.trie import DraftTree
from services.verifier.sequence import TargetSequence


def judge(
    sequences: Sequence[TargetSequence],
    trees: Sequence[DraftTree],
    logits: Sequence[Tensor],
    maxima: Sequence[Tensor] | None = None,
) -> list[Verdict | RuleError]:
    """Decide what each sequence accepts.

    Args:
        sequences: sequences with logits in this step.
        trees: the draft nodes each of them ran.
        logits: for each sequence `[1 + nodes, vocab]` float32: the root's row, then the nodes' rows.
        maxima: of their logits, where the engine gives them (see `StepOutput`).

    Returns:
        One verdict for each sequence, in order; the error where a rule of its cannot go on.
    """
    outcomes: dict[int, Verdict | RuleError] = {}
    for which, sequence in enumerate(sequences):
        try:
            for rule in sequence.rules:
                rule.apply(logits[which], trees[which])
            if sequence.rules and maxima is not None:
                maxima[which].copy_(maxima_of(logits[which]))
        except RuleError as error:
            outcomes[which] = error
    going_on = [which for which in range(len(sequences)) if which not in outcomes]
    if going_on:
        verdicts = verify_step(
            joined([logits[which] for which in going_on]),
            [trees[which] for which in going_on],
            [sequences[which].committed_length for which in going_on],
            [sequences[which].spec.sampling for which in going_on],
            None if maxima is None else joined([maxima[which] for which in going_on]),
        )
        outcomes.update(zip(going_on, verdicts, strict=True))
    return [outcomes[which] for which in range(len(sequences))]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """`[n_i, width]` each to `[sum of n_i, width]`: no copy where they lie one after the other, as a step gives them.

    64 sequences of 5 rows over 49,152 tokens are 63 MB, and copying them takes longer than judging them.
    """
    first = parts[0]
    width, end = first.shape[1], first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or not _share_memory(part, first):
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    num_rows = sum(part.shape[0] for part in parts)
    return first.as_strided((num_rows, width), (width, 1), first.storage_offset())


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
