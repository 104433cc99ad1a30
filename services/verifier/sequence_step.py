"""What one step did with one sequence: the record that the stages after the forward pass fill in.

Responsible for: the record's fields and the row numbers that follow from them.

Deliberately does not know: how a stage comes to its part.

Called by: verification, commit, log-probabilities and the step loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.sampling.rules import RuleError
from paceline.sampling.verify import Verdict
from services.verifier.report import CommitReport
from services.verifier.schedule import StepInput
from services.verifier.sequence_state import Finish


@dataclass(slots=True)
class SequenceStep:
    """One scheduled sequence of a step.

    Attributes:
        input: what was scheduled.
        index: the sequence's place in the step.
        first_row: first of the sequence's rows in the step's logits.
        raw_logits: `[1 + nodes, vocab]` float32, the target's own before any rule; None unless the request asks for
            log-probabilities.
        verdict: the accepted draft tokens and the target's own token; None where the root was not run.
        rule_error: why the sequence cannot continue; None while it can.
        start: position of the first kept row.
        kept_rows: the sequence's rows that stay in the KV cache, ascending.
        commit: what the sequence gained; None where it gained nothing.
    """

    input: StepInput
    index: int
    first_row: int
    raw_logits: Tensor | None = None
    verdict: Verdict | None = None
    rule_error: RuleError | None = None
    start: int = 0
    kept_rows: list[int] | None = None
    commit: CommitReport | None = None

    @property
    def root_row(self) -> int:
        """Row of the root in the step's logits; the rows of the draft nodes follow."""
        return self.first_row + self.input.num_prompt_logits

    @property
    def tokens_to_draft_from(self) -> tuple[int, ...]:
        """The committed tokens, where a drafter may continue from them: not after the sequence's end."""
        commit = self.commit
        return tuple(commit.tokens) if commit is not None and commit.finish is Finish.NOT_YET else ()
