"""What every drafter is: the protocol that verifier and drafter processes host, whatever the method.

A drafter follows each sequence's committed tokens and, where its method reads them, the target's features, and
proposes how the text may go on. It knows nothing of services, transports or the verifier's decisions beyond the
tokens it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.sampling import SUPPORT_SIZE, SamplingParams, VerifyMode
from paceline.target import TapSpec
from paceline.target.kv_slot import Slot
from paceline.trie import DraftEntry, DrawRule

GREEDY = SamplingParams(temperature=0.0)

DEFAULT_RULES = {
    VerifyMode.REJECTION: DrawRule.WITHOUT_REPLACEMENT,
    VerifyMode.BLOCK: DrawRule.WITHOUT_REPLACEMENT,
}
"""How drafters choose tokens in modes that verify draws; `docs/modes.md` has the measurement."""


class DrafterError(Exception):
    """A drafter was told something that does not fit what it was told before."""


class UnknownDraftSequenceError(DrafterError):
    """The drafter holds no such sequence."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A wish for a draft that goes on from a sequence's committed tokens.

    Attributes:
        num_tokens: tokens in a row, at least 1.
        max_nodes: nodes in all; more than `num_tokens` lets methods that can branch draft a tree of that depth.
        sampling: how the target will choose, so that the drafter chooses alike.
        rule: how to choose tokens in a mode that verifies draws; None takes `DEFAULT_RULES`.
        support_size: most tokens that a token is drawn from.
        reads_features: False drafts without the target's features, for methods that can do with and without them; such
            a draft does not wait for them.
    """

    sequence_id: int
    num_tokens: int
    max_nodes: int = 0
    sampling: SamplingParams = field(default=GREEDY)
    rule: DrawRule | None = None
    support_size: int = SUPPORT_SIZE
    reads_features: bool = True

    @property
    def draw_rule(self) -> DrawRule:
        """How tokens are chosen: drawn, or the likeliest (in coupled mode the winners of the target's own race)."""
        default = DEFAULT_RULES.get(self.sampling.resolved_mode)
        return DrawRule.TOP if default is None else self.rule or default

    @property
    def may_rank(self) -> bool:
        """Whether a tree of likeliest tokens may be drafted: draws must not be ranked by their values."""
        return may_rank(self.sampling, self.draw_rule)


@dataclass(frozen=True, slots=True)
class OutcomeRequest:
    """A wish for what follows the likely outcomes of the step that verifies a sequence's last draft.

    An outcome is what the target may commit: some of the draft's tokens, and one that is not in it. Where the paths
    behind it reach the target before it has committed one of them, the next step needs no round trip (outcome
    enumeration: Kumar et al., 2603.03251, whose cache of outcomes here is the target's own trie).

    Attributes:
        num_tokens: tokens in a row behind each outcome, at least 1.
        max_outcomes: outcomes, the likeliest first; at least 1.
        max_nodes: nodes in all, those that lead to the outcomes included.
        sampling: as in `DraftRequest`.
        partition: of drafters that share a sequence's outcomes, which this one is.
        num_partitions: how many they are.
    """

    sequence_id: int
    num_tokens: int
    max_outcomes: int
    max_nodes: int
    sampling: SamplingParams = field(default=GREEDY)
    partition: int = 0
    num_partitions: int = 1


def may_rank(sampling: SamplingParams, rule: DrawRule | None = None) -> bool:
    """Whether tokens may be chosen for a tree by how likely the target is to choose them.

    Not where it verifies draws, as it does under the rule, or by default in the request's mode. In block mode a draft
    is a chain.
    """
    mode = sampling.resolved_mode
    rule = rule or DEFAULT_RULES.get(mode, DrawRule.TOP)
    return rule is DrawRule.TOP and mode is not VerifyMode.BLOCK


@runtime_checkable
class Drafter(Protocol):
    """A drafting method with its weights and the state of the sequences it drafts for.

    Not thread-safe: one thread owns it. Drafts may be asked for more than once from the same committed tokens: a
    longer wish continues the chain that is there and costs only the tokens that are new, which is how a drafter
    drafts ahead while the target verifies.
    """

    @property
    def method(self) -> str:
        """Name of the method, such as "eagle3"."""

    @property
    def tap(self) -> TapSpec | None:
        """The target's features it reads; None for methods that read tokens alone."""

    @property
    def max_positions(self) -> int:
        """Positions it can draft within; past them the text goes on without it."""

    @property
    def longest_draft(self) -> int | None:
        """Most tokens in a row that a draft can have, whatever is asked for; None where positions alone bound it."""

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence with these committed tokens."""

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens; `start` is the committed length before them.

        Raises:
            UnknownDraftSequenceError: the sequence is not open.
            DrafterError: tokens are missing between what is known and `start`.
        """

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features `[n, width]` of positions `start` to `start + n - 1`; what is known already is skipped.

        Raises:
            UnknownDraftSequenceError: the sequence is not open.
            DrafterError: features are missing between what is known and `start`.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft for several sequences together.

        Returns:
            For each request an entry that starts at the committed length, or None where the drafter cannot yet (its
            features are still on the way) or not any more (out of positions).
        """

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_go_on: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past the likely outcomes of the steps that verify the sequences' last drafts.

        Args:
            requests: one for each sequence.
            may_go_on: asked before every pass; once it says no, what there is by then is returned.

        Returns:
            For each request an entry from the committed length of the last draft: paths of its tokens, an outcome's
            token, and what may follow. None where there is no draft to go on from, where it was drawn, or where the
            method cannot.
        """

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""


@runtime_checkable
class ReadsInPlace(Protocol):
    """A drafter that can read the target's key-value cache where it lies, if it stands beside the target."""

    def read_in_place(self, find: Callable[[int], Slot | None]) -> None:
        """Read slots of the target from now on; `tap` may be another one afterwards.

        Args:
            find: the slot of a sequence, which holds its committed tokens but the last whenever a draft is asked for;
                None where it has none now.
        """
