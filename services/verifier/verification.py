"""Which draft tokens a step accepts: from the logits of a step to one verdict per sequence.

Responsible for: applying the rules of each request to its logits, and calling the verification of `paceline.sampling`,
which knows no sequences. The acceptance decision itself is `paceline.sampling.batch.verify_step`.

Deliberately does not know: what happens to accepted and rejected tokens (`commit.py`).

Called by: the step loop, once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.draft_tree import DraftTree
from paceline.sampling.batch import verify_step
from paceline.sampling.rows import maxima_of
from paceline.sampling.rules import RuleError
from paceline.sampling.verify import Verdict
from paceline.target import StepOutput
from services.verifier.log_probs import raw_rows
from services.verifier.schedule import StepInput
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_step import SequenceStep


def verify(inputs: Sequence[StepInput], output: StepOutput) -> list[SequenceStep]:
    """Decide what each scheduled sequence accepts; one record per sequence, in the order of the step."""
    steps = [
        SequenceStep(step_input, index, first)
        for index, (step_input, first) in enumerate(zip(inputs, output.firsts, strict=True))
    ]
    deciding = [step for step in steps if step.input.reaches_root]
    for step in deciding:
        if step.input.sequence.spec.num_top is not None:
            step.raw_logits = raw_rows(step, output.rows)  # before the rules change them
    verdicts = verify_sequences(
        [step.input.sequence for step in deciding],
        [step.input.tree for step in deciding],
        output.rows,
        [step.root_row for step in deciding],
        output.row_maxima,
    )
    for step, verdict in zip(deciding, verdicts, strict=True):
        if isinstance(verdict, RuleError):
            step.rule_error = verdict
        else:
            step.verdict = verdict
    return steps


def verify_sequences(
    sequences: Sequence[TargetSequence],
    trees: Sequence[DraftTree],
    logits: Tensor,
    firsts: Sequence[int],
    maxima: Tensor | None = None,
) -> list[Verdict | RuleError]:
    """Apply each sequence's rules to its logits, then decide which draft tokens it accepts.

    Args:
        sequences: sequences with logits in this step.
        trees: the draft nodes that each of them ran.
        logits: `[rows, vocab]` float32 of the whole step; rules change them in place.
        firsts: for each sequence the row of its root; the rows of its nodes follow.
        maxima: of the logits, where the engine gives them (see `StepOutput`).

    Returns:
        One verdict for each sequence, in order; the error where a rule allows no token.
    """
    failed: dict[int, RuleError] = {}
    for index, sequence in enumerate(sequences):
        if not sequence.rules:
            continue
        rows = slice(firsts[index], firsts[index] + 1 + len(trees[index]))
        try:
            for rule in sequence.rules:
                rule.apply(logits[rows], trees[index])
        except RuleError as error:
            failed[index] = error
            continue
        if maxima is not None:
            maxima[rows] = maxima_of(logits[rows])
    passed = [index for index in range(len(sequences)) if index not in failed]
    if not passed:
        return list(failed.values())
    verdicts = verify_step(
        logits,
        [trees[index] for index in passed],
        [sequences[index].committed_length for index in passed],
        [sequences[index].spec.sampling for index in passed],
        maxima,
        [firsts[index] for index in passed],
    )
    if not failed:
        return list(verdicts)
    results: dict[int, Verdict | RuleError] = {**failed, **dict(zip(passed, verdicts, strict=True))}
    return [results[index] for index in range(len(sequences))]
