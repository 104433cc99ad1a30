"""What each sequence runs in a step: how much of its text, and which draft nodes after it.

Responsible for: choosing the rows of a step from the state of the running sequences, under the policy and the node
budget.

Deliberately does not know: how many nodes are worth it (`budget.py`), what comes of the rows.

Called by: the step loop, once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.contract.policy import StepPolicy
from paceline.draft_tree import EMPTY_TREE, DraftTree
from paceline.target import SequenceRows
from services.verifier.budget import MODES_OF_DRAWS, NodeBudget, NodeChoice
from services.verifier.sequence import TargetSequence

MAX_PROMPT_LOGITS = 256
"""Prompt rows of one step whose logits are wanted: 50 MB of logits for a vocabulary of 49,152."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one sequence runs in a step.

    Attributes:
        num_committed_rows: leading rows that are committed tokens, the root included where it is in this step.
        tree: draft nodes that run after the root; empty while the prompt is still being run.
        reaches_root: True where the step runs the root, so that tokens are committed.
        num_prompt_logits: leading rows whose logits are wanted for the prompt's log-probabilities.
    """

    sequence: TargetSequence
    num_committed_rows: int
    tree: DraftTree
    reaches_root: bool
    num_prompt_logits: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the sequence in the step."""
        return self.num_committed_rows + len(self.tree)

    @property
    def num_prefill_rows(self) -> int:
        """Rows of committed tokens before the root."""
        return self.num_committed_rows - self.reaches_root

    def without_drafts(self) -> StepInput:
        """The same text without draft nodes."""
        return replace(self, tree=EMPTY_TREE) if len(self.tree) else self

    def engine_rows(self) -> SequenceRows:
        """The rows as the engine runs them."""
        sequence, tree = self.sequence, self.tree
        text = sequence.committed[sequence.num_cached : sequence.num_cached + self.num_committed_rows]
        root = self.num_committed_rows - 1
        parents = None
        if len(tree):
            parents = [*range(-1, root), *(root if p < 0 else root + 1 + p for p in tree.parents)]
        end = self.num_rows if self.reaches_root else root
        return SequenceRows(
            slot=sequence.slot,
            tokens=[*text, *tree.tokens],
            parents=parents,
            num_logits=[*range(self.num_prompt_logits), *range(root, end)],
            wants_features=sequence.may_be_read,
        )


def schedule(running: Iterable[TargetSequence], policy: StepPolicy) -> list[StepInput]:
    """Rows of every running sequence: all draft nodes that the policy allows it, and prompts in chunks."""
    prefill_left = policy.max_prefill_tokens_per_step
    prompt_logits_left = MAX_PROMPT_LOGITS
    inputs: list[StepInput] = []
    for sequence in running:
        if sequence.is_decoding:
            tree = sequence.choose_tree(policy.max_nodes_per_sequence)
            inputs.append(StepInput(sequence, 1, tree, reaches_root=True))
        elif prefill_left > 0:
            num_rows = min(sequence.num_uncached, prefill_left)
            if sequence.spec.num_prompt_top is not None:
                num_rows = min(num_rows, prompt_logits_left)
                prompt_logits_left -= num_rows
                if num_rows == 0:
                    continue
            prefill_left -= num_rows
            reaches_root = num_rows == sequence.num_uncached
            num_logits = _num_prompt_logits(sequence, num_rows)
            inputs.append(StepInput(sequence, num_rows, EMPTY_TREE, reaches_root, num_logits))
    return inputs


def _num_prompt_logits(sequence: TargetSequence, num_rows: int) -> int:
    """How many of the next `num_rows` rows come before prompt tokens whose log-probabilities are wanted."""
    if sequence.spec.num_prompt_top is None:
        return 0
    return max(0, min(num_rows, sequence.spec.num_prompt_tokens - 1 - sequence.num_cached))


def keep_worthwhile_nodes(
    inputs: Sequence[StepInput], policy: StepPolicy, budget: NodeBudget, overhead_s: float
) -> tuple[list[StepInput], NodeChoice]:
    """Cut the draft trees of a step to the nodes that are worth verifying.

    Args:
        inputs: of all sequences of the step.
        policy: `max_nodes_per_step` limits the nodes; the tokens of n-gram proposals are added to it.
        budget: chooses the nodes.
        overhead_s: time that the step takes whatever its rows.
    """
    committing = [step_input for step_input in inputs if step_input.reaches_root]
    modes = {step_input.sequence.spec.sampling.resolved_mode for step_input in inputs}
    # The policy's limit is made for drafts. N-gram proposals raise it, so that they take no place from drafts.
    num_ngram_nodes = sum(
        len(proposal.tokens)
        for step_input in committing
        if (proposal := step_input.sequence.ngram_proposal) is not None
    )
    choice = budget.choose(
        [step_input.tree for step_input in committing],
        is_rejection=not modes.isdisjoint(MODES_OF_DRAWS),
        max_nodes=policy.max_nodes_per_step + num_ngram_nodes,
        other_rows=sum(step_input.num_prefill_rows for step_input in inputs),
        overhead_s=overhead_s,
    )
    trees = iter(choice.trees)
    chosen = [next(trees) if step_input.reaches_root else step_input.tree for step_input in inputs]
    return [
        step_input if tree is step_input.tree else replace(step_input, tree=tree)
        for step_input, tree in zip(inputs, chosen, strict=True)
    ], choice


def num_rows(inputs: Sequence[StepInput]) -> int:
    """Rows of a step."""
    return sum(step_input.num_rows for step_input in inputs)
