"""A drafter whose acceptance, speed and confidence are dials.

Responsible for: drafts from a script, past the likeliest outcomes where asked, and taking as long over them as the
dials say. Deliberately does not know: services, the wire. Hosted by the drafter service like any other
(experiments.dials.drafter_process).

What is synthetic: the tokens (the target's own, or wrong ones, by luck) and the time (slept, so it costs no core).
Like a drafter that keeps what it has computed, it pays only for tokens that it has not drafted from the same text.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from torch import Tensor

from experiments.dials.dials import Dials
from experiments.dials.luck import Luck
from experiments.dials.script import Script
from paceline.drafts import DraftEntry
from paceline.methods.drafter import DrafterError, DraftRequest, OutcomeRequest, UnknownDraftSequenceError
from paceline.target import TapSpec

_NEVER = -1


@dataclass(slots=True)
class _Run:
    """Tokens in a row that have been drafted: the positions from `start` on."""

    start: int = _NEVER
    num_tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    """A text that is being followed.

    Attributes:
        right: its tokens as the target will say them, prompt included.
        length: committed tokens.
        is_lost: the committed text is not the script's: nothing can be drafted for it.
        chain: the last draft and what was drafted past its end.
        ahead: the draft past the outcome that will come about, where that was among those enumerated.
        drafted: length of the last draft, which outcomes are counted from.
    """

    right: tuple[int, ...]
    length: int
    luck: Luck
    dials: Dials
    is_lost: bool
    chain: _Run
    ahead: _Run
    drafted: _Run

    def num_known(self) -> int:
        """Tokens from the committed length on that have been drafted already."""
        return max(self._reach(self.chain), self._reach(self.ahead))

    def _reach(self, run: _Run) -> int:
        """How far a run goes past the committed length; 0 where the text has left it."""
        left = run.start + run.num_tokens - self.length
        if run.start == _NEVER or left <= 0 or self.length < run.start:
            return 0
        return left if all(map(self.luck.is_right, range(run.start, self.length))) else 0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The first error of a draft stands at `position`, and `token` there instead; past the end: `token` comes next."""

    chance: float
    position: int
    token: int
    confidence: float


class DialledDrafter:
    """See the module; follows `paceline.methods.drafter.Drafter`.

    Args:
        script: the target's texts.
        dials: the dials in force; asked when a sequence is opened, and kept for it.
        clock: monotonic, seconds.
        sleep: waits so many seconds.
    """

    method = "dialled"
    tap: TapSpec | None = None
    max_positions = 1 << 20
    longest_draft: int | None = None

    def __init__(
        self,
        script: Script,
        dials: Callable[[], Dials],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._script = script
        self._dials = dials
        self._clock = clock
        self._sleep = sleep
        self._sequences: dict[int, _Sequence] = {}

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence; one whose tokens begin no text of the script gets no drafts."""
        which = self._script.find(tokens)
        dials = self._dials()
        self._sequences[sequence_id] = _Sequence(
            right=() if which is None else self._script.texts[which].tokens,
            length=len(tokens),
            luck=Luck(dials, which or 0),
            dials=dials,
            is_lost=which is None,
            chain=_Run(),
            ahead=_Run(),
            drafted=_Run(),
        )

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens; tokens that are not the script's end the drafts for this sequence.

        Raises:
            UnknownDraftSequenceError: the sequence is not open.
            DrafterError: tokens are missing between what is known and `start`.
        """
        sequence = self._get(sequence_id)
        if start > sequence.length:
            raise DrafterError(f"tokens from {start}, known up to {sequence.length}")
        fresh = tuple(tokens[sequence.length - start :])
        sequence.is_lost |= sequence.right[sequence.length : sequence.length + len(fresh)] != fresh
        sequence.length += len(fresh)

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features; it has no use for them."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains for several sequences together, in the time that the dials give to what is new in them.

        Returns:
            For each request a chain from the committed length, or None off the script and past its end.
        """
        begun_s = self._clock()
        entries: list[DraftEntry | None] = []
        work: list[tuple[Dials, int]] = []
        for request in requests:
            sequence = self._get(request.sequence_id)
            num_tokens = self._num_tokens(sequence, request.num_tokens)
            if num_tokens <= 0:
                entries.append(None)
                continue
            known = sequence.num_known()
            work.append((sequence.dials, num_tokens - known))
            sequence.chain = _Run(sequence.length, max(num_tokens, known))
            sequence.drafted = _Run(sequence.length, num_tokens)
            positions = range(sequence.length, sequence.length + num_tokens)
            entries.append(
                DraftEntry.chain(
                    sequence.length,
                    [self._token(sequence, position) for position in positions],
                    [log(sequence.luck.confidence(position)) for position in positions],
                )
            )
        self._take_time(begun_s, work)
        return entries

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past the likeliest outcomes of the verification of each sequence's last draft, a token at a time.

        Returns:
            For each request an entry of whole paths, as long as they were when `may_continue` said no. It starts where
            that draft did. None where there is no draft, its text has gone on since, this drafter's share of the
            outcomes is empty, or there was no time for a token.
        """
        begun_s = self._clock()
        shares = [self._partition(request) for request in requests]
        num_rows = sum(map(len, shares))
        num_passes = 0
        dials = [self._get(request.sequence_id).dials for request in requests]
        wanted = max(
            (r.num_tokens for r, partition in zip(requests, shares, strict=True) if partition), default=0
        )
        while num_passes < wanted and may_continue():
            # A block comes out whole.
            num_passes = wanted if any(each.is_parallel for each in dials) else num_passes + 1
            self._sleep_until(begun_s + max(each.draft_s(num_passes, num_rows) for each in dials))
        return [
            self._past(request, partition, min(num_passes, request.num_tokens))
            if partition and num_passes
            else None
            for request, partition in zip(requests, shares, strict=True)
        ]

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.pop(sequence_id, None)

    def _get(self, sequence_id: int) -> _Sequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"no sequence {sequence_id}") from None

    @staticmethod
    def _num_tokens(sequence: _Sequence, wanted: int) -> int:
        return 0 if sequence.is_lost else min(wanted, len(sequence.right) - sequence.length)

    def _token(self, sequence: _Sequence, position: int) -> int:
        """The token drafted for a position behind right ones."""
        right = sequence.right[position]
        if sequence.luck.is_right(position):
            return right
        return sequence.luck.wrong_token(position, right, self._script.vocab_size)

    def _outcomes(self, sequence: _Sequence, most: int) -> list[_Outcome]:
        """The likeliest outcomes of verifying the last draft, as this drafter sees them."""
        luck, num_alternatives = sequence.luck, sequence.dials.num_alternatives
        rate = sequence.dials.bonus_hit_rate / num_alternatives
        found: list[_Outcome] = []
        reached = 1.0
        end = sequence.length + sequence.drafted.num_tokens
        for position in range(sequence.length, min(end + 1, len(sequence.right))):
            chance, right = luck.chance(position), sequence.right[position]
            rank = None if luck.is_right(position) else luck.rank(position)
            said = max((1 - chance) * rate, 1e-6)
            for which in range(num_alternatives):
                # Past the drafted token's own place among the wrong ones, so that all of them differ.
                wrong = luck.wrong_token(position, right, self._script.vocab_size, which + 1)
                token = right if which == rank else wrong
                found.append(_Outcome(reached * (1 - chance) * rate, position, token, said))
            if position == end:
                own = self._token(sequence, position)
                found.append(_Outcome(reached * chance, position, own, luck.confidence(position)))
            reached *= chance
        return heapq.nlargest(most, found, key=lambda outcome: outcome.chance)

    def _partition(self, request: OutcomeRequest) -> list[_Outcome]:
        """This drafter's share of the outcomes, as many as fit with the whole path behind each."""
        sequence = self._get(request.sequence_id)
        if sequence.is_lost or sequence.drafted.start != sequence.length:
            return []
        fits = (request.max_nodes - sequence.drafted.num_tokens) // (1 + request.num_tokens)
        partition = self._outcomes(sequence, request.max_outcomes)[
            request.partition :: request.num_partitions
        ]
        return partition[: max(0, fits)]

    def _past(self, request: OutcomeRequest, outcomes: Sequence[_Outcome], num_tokens: int) -> DraftEntry:
        """The entry: the last draft, every outcome's token, and so many tokens behind each."""
        sequence = self._get(request.sequence_id)
        start, luck = sequence.length, sequence.luck
        drafted = range(start, start + sequence.drafted.num_tokens)
        tokens = [self._token(sequence, position) for position in drafted]
        parents = list(range(-1, len(tokens) - 1))
        confidences = [luck.confidence(position) for position in drafted]
        for outcome in outcomes:
            behind = range(outcome.position + 1, min(outcome.position + 1 + num_tokens, len(sequence.right)))
            parents += [outcome.position - start - 1, *range(len(tokens), len(tokens) + len(behind))]
            is_right = outcome.token == sequence.right[outcome.position]
            tokens.append(outcome.token)
            confidences.append(outcome.confidence)
            for position in behind:
                tokens.append(
                    self._token(sequence, position) if is_right else self._filler(sequence, position)
                )
                confidences.append(luck.confidence(position))
            if is_right and all(map(luck.is_right, range(start, outcome.position))):
                sequence.ahead = _Run(outcome.position + 1, len(behind))
        return DraftEntry(start, tuple(tokens), tuple(parents), tuple(map(log, confidences)))

    def _filler(self, sequence: _Sequence, position: int) -> int:
        """A token behind a wrong one: nobody will ever ask for it."""
        return sequence.luck.wrong_token(position, sequence.right[position], self._script.vocab_size, 1)

    def _take_time(self, begun_s: float, work: Sequence[tuple[Dials, int]]) -> None:
        """Sleeps until the call has lasted as long as its new tokens should: (dials, new tokens) of each row."""
        rows = [(dials, fresh) for dials, fresh in work if fresh > 0]
        self._sleep_until(
            begun_s + max((dials.draft_s(fresh, len(rows)) for dials, fresh in rows), default=0.0)
        )

    def _sleep_until(self, ends_s: float) -> None:
        while (left_s := ends_s - self._clock()) > 0:
            self._sleep(left_s)
