"""What follows a verdict: accepted rows and tokens are kept, rejected draft tokens are thrown away.

Responsible for: the order in which cache, text, trie, calibrators and drafters learn of a step's verdicts.

Deliberately does not know: how a verdict came about (`verification.py`), frames, metrics.

Called by: the step loop, once per step, after verification.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.sampling.rules import RuleError
from paceline.sampling.verify import FinalKind, Verdict
from paceline.target import StepOutput, TargetEngine
from services.verifier.budget import NodeBudget
from services.verifier.calibration import learn
from services.verifier.colocated import ColocatedDrafter
from services.verifier.feature_hub import FeatureHub
from services.verifier.feature_log import owned
from services.verifier.report import CommitReport
from services.verifier.schedule import StepInput
from services.verifier.sequence_state import Finish
from services.verifier.sequence_step import SequenceStep
from services.verifier.table import TargetSequences


class StepCommitter:
    """Applies the verdicts of a step, stage by stage over all its sequences."""

    def __init__(
        self,
        engine: TargetEngine,
        table: TargetSequences,
        features: FeatureHub,
        drafter: ColocatedDrafter | None,
        budget: NodeBudget,
    ) -> None:
        self._engine = engine
        self._table = table
        self._features = features
        self._drafter = drafter
        self._budget = budget

    def commit(self, steps: Sequence[SequenceStep], output: StepOutput, *, is_projected: bool) -> None:
        """Apply the verdicts of a step.

        Args:
            steps: the step's sequences with their verdicts; this fills in kept rows and commits.
            output: of the forward pass.
            is_projected: whether the output's features are projected, because a drafter reads them now.
        """
        for step in steps:
            if step.rule_error is None:
                self._keep_accepted_rows(step)
                self._commit_tokens(step)
        if output.features:
            # One right after the other, so that a drafter can draft for all of these sequences together.
            for step in steps:
                if step.rule_error is None and step.input.sequence.may_be_read:
                    self._hand_over_features(step, output.features[step.index], is_projected=is_projected)
        for step in steps:
            if step.rule_error is not None:
                self._table.fail_rule(step.input.sequence, step.rule_error)

    def _keep_accepted_rows(self, step: SequenceStep) -> None:
        """Keep the keys and values of committed and accepted tokens; those of rejected draft tokens are dropped."""
        sequence, root = step.input.sequence, step.input.num_committed_rows - 1
        accepted = () if step.verdict is None else step.verdict.accepted_rows
        step.kept_rows = kept = [*range(root + 1), *(root + row for row in accepted)]
        self._engine.keep(sequence.slot, kept)
        step.start = sequence.num_cached
        sequence.num_cached += len(kept)

    def _commit_tokens(self, step: SequenceStep) -> None:
        """Append the verdict's tokens to the text; the sequence's trie drops the draft tokens that they contradict."""
        if step.verdict is not None:
            try:
                step.commit = self._sequence_commit(step.input, step.verdict)
            except RuleError as error:
                step.rule_error = error
                return
        step.input.sequence.propose_ngram()

    def _sequence_commit(self, step_input: StepInput, verdict: Verdict) -> CommitReport:
        sequence, tree = step_input.sequence, step_input.tree
        start = sequence.committed_length
        if len(tree):
            self._budget.observe_draft(tree, len(verdict.accepted_tokens))
        acceptance_samples = learn(sequence.calibrator, tree, verdict.accepted_rows)
        num_accepted_of_drafter = sum(1 for row in verdict.accepted_rows if tree.is_drafted(row - 1))
        tokens, finish, num_dropped = sequence.commit(
            verdict.committed_tokens, is_whole_draft=verdict.kind is not FinalKind.RECOVERED
        )
        self._table.drops.stale += num_dropped
        return CommitReport(
            sequence=sequence,
            start=start,
            tokens=tokens,
            num_draft_tokens=len(tree),
            draft_depth=max(tree.depths, default=0),
            num_accepted_tokens=min(len(verdict.accepted_tokens), len(tokens)),
            num_ngram_tokens=tree.num_ngram_nodes,
            drafter_depth=tree.drafted_depth,
            num_accepted_of_drafter=min(num_accepted_of_drafter, len(tokens)),
            finish=finish,
            is_cache_hit=finish is Finish.NOT_YET and sequence.trie.num_nodes > 0,
            acceptance_samples=acceptance_samples,
        )

    def _hand_over_features(self, step: SequenceStep, rows: Tensor, *, is_projected: bool) -> None:
        """Give the features of the kept rows, `[n, width]`, to the drafter here and to the readers elsewhere."""
        assert step.kept_rows is not None, "the rows were kept before"
        kept, start, tokens = step.kept_rows, step.start, step.tokens_to_draft_from
        if self._engine.taps[0].last_only:  # a draft needs only the position that it continues from
            start, kept = start + len(kept) - 1, kept[-1:] if tokens else []
        if not kept:
            return
        rows = rows[: len(kept)] if kept[-1] == len(kept) - 1 else rows[kept]
        sequence_id = step.input.sequence.sequence_id
        if self._drafter is not None:
            if is_projected:
                self._drafter.feed(sequence_id, start, rows)
            else:
                rows = owned(rows)  # one copy for the drafter and for the log
                self._drafter.keep(sequence_id, start, rows, self._engine.project)
        elif is_projected:
            rows = rows.cpu()
        self._features.append(sequence_id, start, rows, tokens, is_projected=is_projected)
