"""The protocol of a drafter, which verifier and drafter processes host.

A drafter follows the committed tokens of each sequence, and the target's features if its method reads them. It proposes
how the text may continue. It does not depend on services or transports, and learns of the verifier's decisions only
through committed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.drafts import DraftEntry, DrawRule
from paceline.sampling.draws import SUPPORT_SIZE
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import TapSpec
from paceline.target.kv.slot import Slot

GREEDY = SamplingParams(temperature=0.0)

DEFAULT_RULES = {
    VerifyMode.REJECTION: DrawRule.WITHOUT_REPLACEMENT,
    VerifyMode.BLOCK: DrawRule.WITHOUT_REPLACEMENT,
}
"""How drafters choose tokens in modes that verify draws; `docs/modes.md` has the measurement."""


class DrafterError(Exception):
    """Tokens or features that do not fit those that came before."""


class UnknownDraftSequenceError(DrafterError):
    """The drafter has no sequence with this id."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a draft that continues a sequence's committed tokens.

    Attributes:
        num_tokens: length of the longest path, at least 1.
        max_nodes: number of nodes of the draft. If it exceeds `num_tokens`, methods that can branch draft a tree.
        sampling: how the target will choose; the drafter chooses by the same rule.
        rule: how to choose tokens in a mode that verifies draws; None takes `DEFAULT_RULES`.
        support_size: most tokens that a token is drawn from.
        reads_features: False drafts without the target's features and does not wait for them, if the method can.
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
    """A request for paths past the likely verification outcomes of a sequence's last draft.

    A verification outcome is what the target may commit: some of the draft's tokens, and one token that is not in the
    draft. If paths past the real outcome are in the target's trie when it commits, the next step needs no round trip
    (speculation cache: Kumar et al., 2603.03251).

    Attributes:
        num_tokens: length of the path past each outcome, at least 1.
        max_outcomes: number of outcomes, the likeliest first; at least 1.
        max_nodes: number of nodes, including those that lead to the outcomes.
        sampling: as in `DraftRequest`.
        partition: index of this drafter among those that share the sequence's outcomes.
        num_partitions: number of those drafters.
    """

    sequence_id: int
    num_tokens: int
    max_outcomes: int
    max_nodes: int
    sampling: SamplingParams = field(default=GREEDY)
    partition: int = 0
    num_partitions: int = 1


def may_rank(sampling: SamplingParams, rule: DrawRule | None = None) -> bool:
    """Whether a tree may take the tokens that the target is likeliest to choose.

    It may not if the target verifies draws, by the rule or by the default of the request's mode. In block mode a draft
    is a chain.
    """
    mode = sampling.resolved_mode
    rule = rule or DEFAULT_RULES.get(mode, DrawRule.TOP)
    return rule is DrawRule.TOP and mode is not VerifyMode.BLOCK


@runtime_checkable
class Drafter(Protocol):
    """A drafting method with its weights and the state of the sequences it drafts for.

    Not thread-safe: one thread owns it. Several requests may follow for the same committed tokens. A longer request
    continues the existing chain and costs only its new tokens; this is how a drafter drafts ahead while the target
    verifies.
    """

    @property
    def method(self) -> str:
        """Name of the method, such as "eagle3"."""

    @property
    def tap(self) -> TapSpec | None:
        """The target's features that it reads; None for methods that read only tokens."""

    @property
    def max_positions(self) -> int:
        """Longest text that it can draft for."""

    @property
    def longest_draft(self) -> int | None:
        """Longest path that a draft can have; None if only `max_positions` limits it."""

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence with these committed tokens."""

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens; `start` is the committed length before them.

        Raises:
            UnknownDraftSequenceError: the sequence is not open.
            DrafterError: tokens are missing before `start`.
        """

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features `[n, width]` of positions `start` to `start + n - 1`; positions that it has are skipped.

        Raises:
            UnknownDraftSequenceError: the sequence is not open.
            DrafterError: features are missing before `start`.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft for several sequences together.

        Returns:
            For each request an entry that starts at the committed length. None if the drafter cannot draft yet
            (features have not arrived) or any more (out of positions).
        """

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past the likely outcomes of the steps that verify the sequences' last drafts.

        Args:
            requests: one for each sequence.
            may_continue: called before every pass; once it returns False, the paths found so far are returned.

        Returns:
            For each request an entry from the committed length of the last draft: paths of its tokens, an outcome's
            token, and tokens after it. None if there is no such draft, if it was drawn, or if the method cannot.
        """

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""


@runtime_checkable
class ReadsInPlace(Protocol):
    """A drafter that can read the target's key-value cache in place, if it runs in the target's process."""

    def read_in_place(self, find: Callable[[int], Slot | None]) -> None:
        """Read slots of the target from now on; `tap` may change.

        Args:
            find: returns the slot of a sequence, or None if it has none now. When a draft is requested, the slot holds
                all committed tokens but the last.
        """
