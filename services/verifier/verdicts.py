"""From the logits of a step to what each sequence commits.

The bridge between paceline.sampling, which knows no sequences, and the step loop. Pure but for the tensors it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.sampling import RuleError, Verdict, maxima_of, verify_step
from paceline.trie import DraftTree
from services.verifier.sequence import TargetSequence


def judge(
    sequences: Sequence[TargetSequence],
    trees: Sequence[DraftTree],
    logits: Tensor,
    firsts: Sequence[int],
    maxima: Tensor | None = None,
) -> list[Verdict | RuleError]:
    """Decide what each sequence accepts.

    Args:
        sequences: sequences with logits in this step.
        trees: the draft nodes each of them ran.
        logits: `[rows, vocab]` float32 of the whole step; rules change them in place.
        firsts: for each sequence the row of its root, behind which the nodes' rows lie.
        maxima: of the logits, where the engine gives them (see `StepOutput`).

    Returns:
        One verdict for each sequence, in order; the error where a rule of its cannot go on.
    """
    failed: dict[int, RuleError] = {}
    for which, sequence in enumerate(sequences):
        if not sequence.rules:
            continue
        rows = slice(firsts[which], firsts[which] + 1 + len(trees[which]))
        try:
            for rule in sequence.rules:
                rule.apply(logits[rows], trees[which])
        except RuleError as error:
            failed[which] = error
            continue
        if maxima is not None:
            maxima[rows] = maxima_of(logits[rows])
    going_on = [which for which in range(len(sequences)) if which not in failed]
    if not going_on:
        return list(failed.values())
    verdicts = verify_step(
        logits,
        [trees[which] for which in going_on],
        [sequences[which].committed_length for which in going_on],
        [sequences[which].spec.sampling for which in going_on],
        maxima,
        [firsts[which] for which in going_on],
    )
    if not failed:
        return list(verdicts)
    outcomes: dict[int, Verdict | RuleError] = {**failed, **dict(zip(going_on, verdicts, strict=True))}
    return [outcomes[which] for which in range(len(sequences))]
