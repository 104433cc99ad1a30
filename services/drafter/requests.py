"""Checks the frames of a conductor and turns them into items for the draft loop.

Every id, count and token is compared with this drafter's limits here, before it indexes a tensor. A wrong opening fails
one sequence. Only a frame that breaks the protocol ends the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from paceline.contract import limits
from paceline.contract.errors import InvalidRequestError
from paceline.contract.failures import FailureReason, StatusCode
from paceline.contract.fields import check_integer, check_prompt, check_reads_features
from paceline.contract.policy import StepPolicy
from paceline.v1 import drafter_pb2, peer_pb2
from services.drafter.inbox import Frame, Opening
from services.drafter.session import DraftSession
from services.runtime.frames import unpack_commits
from services.runtime.sampling import sampling_params


class FrameReader:
    """Checks frames against one drafter's limits."""

    def __init__(self, info: peer_pb2.PeerInfo, clock: Callable[[], float]) -> None:
        self._vocab_size = info.vocab_size
        self._max_positions = info.max_positions
        self._tap = info.tap
        self._clock = clock
        self._local_ids: Iterator[int] = itertools.count(1)

    def read(
        self,
        session: DraftSession,
        request: drafter_pb2.DraftRequest,
        admit: Callable[[drafter_pb2.OpenDraftSequence, Opening], None],
    ) -> Frame:
        """A checked frame.

        Args:
            session: the stream of the frame.
            request: the frame.
            admit: called with each valid opening, as a message and as read, before it reaches the loop; may refuse it
                by raising InvalidRequestError.

        Raises:
            StreamProtocolError: the commits cannot be read.
            InvalidRequestError: the policy is out of range.
        """
        commits = unpack_commits(request.commits, self._vocab_size) if request.HasField("commits") else ()
        openings: list[Opening] = []
        failures: list[peer_pb2.SequenceFailure] = []
        for message in request.opens:
            try:
                opening = self._opening(message)
                admit(message, opening)
            except InvalidRequestError as error:
                failures.append(
                    failure(message.sequence_id, StatusCode.INVALID_ARGUMENT, error.reason, str(error))
                )
            except OutOfPositionsError as error:
                failures.append(
                    failure(
                        message.sequence_id,
                        StatusCode.OUT_OF_RANGE,
                        FailureReason.OUT_OF_POSITIONS,
                        str(error),
                    )
                )
            else:
                openings.append(opening)
        return Frame(
            session=session,
            frame_id=request.frame_id,
            arrived_at=self._clock(),
            closes=tuple(request.closes),
            openings=tuple(openings),
            commits=tuple(commits),
            policy=StepPolicy.from_proto(request.policy) if request.HasField("policy") else None,
            failures=tuple(failures),
        )

    def _opening(self, message: drafter_pb2.OpenDraftSequence) -> Opening:
        tokens = tuple(message.token_ids)
        num_partitions = message.num_partitions or 1
        if message.sequence_id == 0:
            raise InvalidRequestError("sequence_id", "must be above 0")
        check_prompt("token_ids", tokens, self._vocab_size, limits.MAX_POSITIONS)
        check_integer("max_draft_tokens", message.max_draft_tokens, 1, limits.MAX_DRAFT_LENGTH)
        check_integer("num_partitions", num_partitions, 1, limits.MAX_PARTITIONS)
        check_integer("partition", message.partition, 0, num_partitions - 1)
        if len(tokens) >= self._max_positions:
            raise OutOfPositionsError(
                f"the text has {len(tokens)} tokens, this drafter has {self._max_positions} positions"
            )
        return Opening(
            local_id=next(self._local_ids),
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            tokens=tokens,
            sampling=sampling_params(message.sampling),
            max_draft_tokens=message.max_draft_tokens,
            partition=message.partition,
            num_partitions=num_partitions,
            reads_features=check_reads_features(
                message.reads_features if message.HasField("reads_features") else None,
                has_tap=self._tap.width > 0,
                is_tap_optional=self._tap.is_optional,
                drafter="this drafter",
            ),
        )


class OutOfPositionsError(ValueError):
    """A sequence is longer than the drafter's positions."""


def failure(sequence_id: int, code: int, reason: str, message: str) -> peer_pb2.SequenceFailure:
    """The message that one sequence failed."""
    return peer_pb2.SequenceFailure(sequence_id=sequence_id, code=code, reason=reason, message=message)
