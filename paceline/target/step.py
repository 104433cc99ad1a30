"""What goes into a step for one sequence and what comes out, and the checks before anything changes.

The verifier, drafters and training build the rows; the engine and its planner read them. This file does not know caches
or executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from paceline.contract.errors import PacelineError
from paceline.target.executor import ModelShape


class StepError(PacelineError):
    """The rows of a step are malformed: empty, out of range, not topological, or for one slot twice."""

    status = "INVALID_ARGUMENT"
    reason = "BAD_STEP"


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a step.

    Attributes:
        slot: an open slot.
        tokens: token of each row.
        parents: parent row of each row, -1 meaning the cached prefix; parents come first. None is a chain.
            In a decode step row 0 is the root (parent -1) and draft node `i` is row `i + 1`.
        num_logits: rows to run through the LM head: all, the last, none, or explicit row indices.
        wants_features: False leaves this sequence out of the taps.
        added: `[rows, hidden]` to add to the rows' input embeddings, for drafters that read features there; None adds
            nothing.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: Literal["last", "all", "none"] | Sequence[int] = "all"
    wants_features: bool = True
    added: Tensor | None = None

    @classmethod
    def decode(
        cls, slot: int, root: int, tokens: Sequence[int] = (), parents: Sequence[int] | None = None
    ) -> SequenceRows:
        """Rows of a decode step: the root, then draft nodes whose parents are node indices (-1: the root)."""
        if parents is None or all(parent == node - 1 for node, parent in enumerate(parents)):
            return cls(slot, (root, *tokens))
        return cls(slot, (root, *tokens), (-1, *(parent + 1 for parent in parents)))

    @property
    def is_chain(self) -> bool:
        """Whether each row follows the one before it."""
        return self.parents is None or all(parent == row - 1 for row, parent in enumerate(self.parents))

    def depths(self) -> tuple[int, ...]:
        """Depth of each row below the cached prefix; the first row of a chain has 0."""
        if self.parents is None:
            return tuple(range(len(self.tokens)))
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return tuple(found)

    def logit_rows(self) -> Sequence[int]:
        """Row indices whose logits are wanted.

        Raises:
            StepError: an unknown name.
        """
        wanted, count = self.num_logits, len(self.tokens)
        if isinstance(wanted, str):
            named = {"all": range(count), "last": range(count - 1, count), "none": range(0)}
            if wanted not in named:
                raise StepError(f"num_logits must be all, last, none or row indices, not {wanted!r}")
            return named[wanted]
        return wanted

    def check(self, past: int, shape: ModelShape) -> None:
        """Raise StepError unless the rows fit a slot of `past` cached tokens of this model."""
        count = len(self.tokens)
        if count == 0:
            raise StepError(f"slot {self.slot} has no rows")
        if min(self.tokens) < 0 or max(self.tokens) >= shape.vocab_size:
            raise StepError(f"slot {self.slot} has a token outside 0..{shape.vocab_size - 1}")
        if self.parents is not None:
            if len(self.parents) != count:
                raise StepError(f"slot {self.slot} has {count} tokens and {len(self.parents)} parents")
            for row, parent in enumerate(self.parents):
                if not -1 <= parent < row:
                    raise StepError(f"slot {self.slot}: parent {parent} of row {row} does not come before it")
        if self.added is not None and tuple(self.added.shape) != (count, shape.hidden_size):
            raise StepError(
                f"slot {self.slot}: added must be {[count, shape.hidden_size]}, not {list(self.added.shape)}"
            )
        if past + max(self.depths()) >= shape.max_positions:
            raise StepError(f"slot {self.slot} would pass the model's {shape.max_positions} positions")
        if any(not 0 <= row < count for row in self.logit_rows()):
            raise StepError(f"slot {self.slot}: logits asked for rows outside 0..{count - 1}")


@dataclass(slots=True)
class StepOutput:
    """What a step returns: the logits of all sequences, and where each sequence's begin, in the order given.

    Callers that read all logits use `rows` and `firsts`: making a view per sequence takes longer than reading.

    Attributes:
        rows: `[k, vocab]` float32 logits.
        firsts: where each sequence's logits begin in `rows`.
        counts: how many it has there.
        row_maxima: `[k, ceil(vocab / 32)]` float32, the largest of every 32 logits; None where not known.
        tap_features: per tap, per sequence `[n_i, width]` in the compute dtype; `[0, width]` where not
            wanted.
    """

    rows: Tensor
    firsts: list[int]
    counts: list[int]
    row_maxima: Tensor | None = None
    tap_features: list[list[Tensor]] = field(default_factory=list)

    @property
    def logits(self) -> list[Tensor]:
        """Each sequence's logits, views `[k_i, vocab]` float32."""
        return self._views(self.rows)

    @property
    def maxima(self) -> list[Tensor] | None:
        """Each sequence's maxima, views `[k_i, ceil(vocab / 32)]` float32; None where not known."""
        return None if self.row_maxima is None else self._views(self.row_maxima)

    @property
    def features(self) -> list[Tensor]:
        """Features of the first tap."""
        return self.tap_features[0] if self.tap_features else []

    def _views(self, rows: Tensor) -> list[Tensor]:
        return [rows[first : first + count] for first, count in zip(self.firsts, self.counts, strict=True)]
