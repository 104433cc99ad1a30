"""What each sequence does in a step: how much of its text is run, and which drafts behind it.

Responsible for turning the state of sequences into rows of a step. Pure: which drafts are worth it is the budget's, and
what comes of the rows the loop's. Called by the step loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.target import SequenceRows
from paceline.trie import EMPTY_TREE, DraftTree
from services.verifier.log_probs import MAX_PROMPT_ROWS, num_prompt_rows
from services.verifier.policy import StepPolicy
from services.verifier.sequence import TargetSequence


@dataclass(frozen=True, slots=True)
class StepInput:
    """One sequence's share of a step.

    Attributes:
        num_settled: leading rows that are committed tokens, the root included where it is in this step.
        tree: draft nodes run behind the root; empty while the prompt is still being run.
        reaches_root: True where the step runs the root, so that tokens are committed.
        num_prompt_logits: leading rows whose logits are wanted for the prompt's log-probabilities.
    """

    sequence: TargetSequence
    num_settled: int
    tree: DraftTree
    reaches_root: bool
    num_prompt_logits: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of it."""
        return self.num_settled + len(self.tree)


def schedule(running: Iterable[TargetSequence], policy: StepPolicy) -> list[StepInput]:
    """A turn of every running sequence, with all drafts that the policy lets it have, and prompts in chunks."""
    prefill_left = policy.max_prefill_tokens
    prompt_logits_left = MAX_PROMPT_ROWS
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
            num_logits = num_prompt_rows(sequence, num_rows)
            inputs.append(StepInput(sequence, num_rows, EMPTY_TREE, reaches_root, num_logits))
    return inputs


def rows_of(step_input: StepInput) -> SequenceRows:
    """What the engine is to run of a turn."""
    sequence, tree = step_input.sequence, step_input.tree
    settled = sequence.committed[sequence.num_cached : sequence.num_cached + step_input.num_settled]
    root = step_input.num_settled - 1
    parents = None
    if len(tree):
        parents = [*range(-1, root), *(root if p < 0 else root + 1 + p for p in tree.parents)]
    end = step_input.num_rows if step_input.reaches_root else root
    return SequenceRows(
        slot=sequence.slot,
        tokens=[*settled, *tree.tokens],
        parents=parents,
        num_logits=[*range(step_input.num_prompt_logits), *range(root, end)],
        wants_features=sequence.may_be_read,
    )


def num_rows(inputs: Sequence[StepInput]) -> int:
    """Rows of a step."""
    return sum(step_input.num_rows for step_input in inputs)
