"""Which draft nodes a step verifies, from what earlier steps and drafts were worth.

Responsible for: a curve of this verifier's own step times, how far the drafters' confidences can be trusted, and one
choice per step with its basis.

Deliberately does not know: how the choice is computed (`paceline.scheduling.budget`), frames, tensors.

Called by: the step loop's stages, on its thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.draft_tree import DraftTree
from paceline.sampling.params import VerifyMode
from paceline.scheduling import StepCurve, StepTable, allocate_nodes

MODES_OF_DRAWS = frozenset({VerifyMode.REJECTION, VerifyMode.BLOCK})
"""In these modes, whether a token is verified must not depend on later draws: see docs/scheduling.md."""

_WARM_UP = 2  # first steps of a size allocate and compile
_REFIT_EVERY = 32  # steps; a fit takes about a millisecond
_EXPLORE_EVERY = 64  # steps; without trying many rows, a choice never learns that they have become cheap
_TRUST_HALF_LIFE = 256.0  # verified drafts
_TRUST_PRIOR = 8.0  # tokens
_TRUST_RANGE = 0.25, 4.0


class Basis(StrEnum):
    """The basis of a choice."""

    BUDGET = "budget"
    """The policy's budget alone: no curve covers this step yet, or the step explores."""
    CURVE = "curve"
    """The best number of nodes under the measured step times."""
    EARLY_STOP = "early_stop"
    """As CURVE, but up to the first number that did not improve, because a sequence of the step verifies draws."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes of one step.

    Attributes:
        trees: the chosen part of each offered tree, in the same order.
        num_offered: nodes of all trees before the choice.
        num_chosen: nodes of all trees after the choice.
    """

    trees: list[DraftTree]
    num_offered: int
    num_chosen: int
    basis: Basis


class NodeBudget:
    """Chooses nodes, and learns from finished steps.

    Args:
        learns: False always uses the policy's budget, so that no choice depends on measured time.
    """

    def __init__(self, *, learns: bool = True) -> None:
        self._learns = learns
        self._curve = StepCurve()
        self._seen: Counter[int] = Counter()
        self._num_steps = 0
        self._table: StepTable | None = None
        self._trust_decay = 2.0 ** (-1.0 / _TRUST_HALF_LIFE)
        self._promised = self._kept = 0.0

    @property
    def trust(self) -> float:
        """Accepted tokens divided by the tokens that confidences promised."""
        low, high = _TRUST_RANGE
        return min(max((self._kept + _TRUST_PRIOR) / (self._promised + _TRUST_PRIOR), low), high)

    def choose(
        self,
        trees: Sequence[DraftTree],
        *,
        is_rejection: bool,
        max_nodes: int,
        other_rows: int = 0,
        overhead_s: float = 0.0,
    ) -> NodeChoice:
        """Cut the trees of a step to the nodes worth verifying.

        A tree lists its nodes best first, so that every head of it is a tree too.

        Args:
            trees: one for each sequence that commits in this step; empty where there is no draft.
            is_rejection: whether a sequence of the step is in one of MODES_OF_DRAWS.
            max_nodes: the policy's limit.
            other_rows: rows of the step that are neither a root nor a draft node.
            overhead_s: time that a step takes whatever its rows.
        """
        num_offered = sum(map(len, trees))
        if not num_offered:
            return NodeChoice(list(trees), 0, 0, Basis.BUDGET)
        table = self._table
        num_rows = other_rows + len(trees) + min(num_offered, max_nodes)
        is_known = table is not None and num_rows <= table.max_rows
        path_acceptances = [tree.path_acceptances for tree in trees]
        if table is None or not is_known or self._num_steps % _EXPLORE_EVERY == 0:
            basis = Basis.BUDGET
            counts = allocate_nodes(path_acceptances, _free, max_nodes=max_nodes)
        else:
            basis = Basis.EARLY_STOP if is_rejection else Basis.CURVE
            counts = allocate_nodes(
                path_acceptances,
                table,
                is_rejection=is_rejection,
                other_rows=other_rows,
                overhead_s=overhead_s,
                scale=self.trust,
                max_nodes=max_nodes,
            )
        chosen = [tree.head(count) for tree, count in zip(trees, counts, strict=True)]
        return NodeChoice(chosen, num_offered, sum(counts), basis)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Learn from a finished step without prompt rows, which cost less because they need no logits."""
        self._num_steps += 1
        if not self._learns or seconds <= 0:
            return
        self._seen[num_rows] += 1
        if self._seen[num_rows] <= _WARM_UP:
            return
        self._curve.observe(num_rows, seconds)
        if self._table is None or self._num_steps % _REFIT_EVERY == 0:
            self._refit()

    def observe_draft(self, tree: DraftTree, num_accepted: int) -> None:
        """Learn how many tokens of a verified tree were accepted."""
        self._promised = self._promised * self._trust_decay + sum(tree.path_acceptances)
        self._kept = self._kept * self._trust_decay + num_accepted

    def _refit(self) -> None:
        """Fit a table over the measured row counts; larger steps are explored, not extrapolated."""
        measured = [rows for rows, count in self._seen.items() if count > _WARM_UP]
        if len(measured) > 1:
            self._table = StepTable(self._curve, max(measured))


def _free(_: int) -> float:
    return 1.0
