"""Draft messages between drafters and verifiers: delayed, repeated, lost and reordered as a test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.drafts import DraftEntry
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.v1 import peer_pb2
from services.runtime import tensors
from services.runtime.frames import pack_drafts, unpack_drafts
from services.verifier.inbox import AddDrafts
from tests.simulation.kit import VOCAB
from tests.simulation.peer import Peer
from tests.simulation.request import Request
from tests.simulation.verifier import ListedSession


@dataclass(frozen=True)
class Message:
    """Draft entries on their way to a verifier."""

    at: int
    session: ListedSession
    drafts: peer_pb2.DraftBatch


class DraftTraffic:
    """The messages on their way.

    Args:
        peers: the verifiers.
        events: counts what happens, by name.
    """

    def __init__(self, peers: Sequence[Peer], events: Counter[str]) -> None:
        self._peers = peers
        self.events = events
        self.messages: list[Message] = []

    def draft(self, at: int, num_tokens: int, max_nodes: int) -> None:
        """Let a verifier's remote drafter draft for all its sequences; this sends the entries."""
        peer = self._peers[at]
        if peer.remote is None:
            return
        for chunk in peer.subscriber.take():
            request = peer.followed.get(chunk.sequence_id)
            if request is not None and request.max_draft_nodes:
                peer.remote.feed(chunk.sequence_id, chunk.start, tensors.decode(chunk.features, 1 << 24))
        wanted = [
            DraftRequest(sequence_id, num_tokens, max_nodes, request.sampling)
            for sequence_id, request in peer.followed.items()
            if request.max_draft_nodes
        ]
        for draft_request, entry in zip(wanted, peer.remote.draft(wanted), strict=True):
            if entry is not None:
                self.events["drafted by a real drafter"] += 1
                self.send(
                    at, draft_request.sequence_id, peer.followed[draft_request.sequence_id].epoch, entry
                )

    def draft_past_outcomes(self, at: int, num_tokens: int, max_outcomes: int, num_partitions: int) -> None:
        """Let a remote drafter draft past likely outcomes of its last drafts, split over several messages."""
        peer = self._peers[at]
        if peer.remote is None:
            return
        for partition in range(num_partitions):
            wanted = [
                OutcomeRequest(
                    sequence_id, num_tokens, max_outcomes, 64, request.sampling, partition, num_partitions
                )
                for sequence_id, request in peer.followed.items()
                if request.max_draft_nodes
            ]
            for draft_request, entry in zip(wanted, peer.remote.draft_outcomes(wanted), strict=True):
                if entry is not None and entry.tokens:
                    self.events["drafted past an outcome"] += 1
                    self.send(
                        at, draft_request.sequence_id, peer.followed[draft_request.sequence_id].epoch, entry
                    )

    def draft_by_script(
        self, request: Request, offset: int, length: int, spoilt: Sequence[int], branches: int, age: int
    ) -> None:
        """Send the plain text with some wrong tokens, from `offset` tokens behind or ahead of the committed length.

        Args:
            offset: added to the number of committed tokens.
            spoilt: places with a wrong token.
            branches: further children of the root, all wrong.
            age: epochs by which the message is too old, or too new where there was none before.
        """
        first = max(0, len(request.tokens) + offset)
        truth = (*request.prompt, *request.plain.tokens)[len(request.prompt) + first :][:length]
        if not truth or not request.sequence_id or len(request.prompt) + first < 1:
            return
        tokens = [(t + 1) % VOCAB if place in spoilt else t for place, t in enumerate(truth)]
        wrong = [(truth[0] + 2 + place) % VOCAB for place in range(branches)]
        entry = DraftEntry.chain(len(request.prompt) + first, tokens, [-0.1] * len(tokens))
        entry = replace(
            entry,
            tokens=(*entry.tokens, *wrong),
            parents=(*entry.parents, *([-1] * branches)),
            log_probs=(*entry.log_probs, *([-0.05] * branches)),
        )
        epoch = request.epoch - age if age <= request.epoch else request.epoch + age
        self.send(request.at, request.sequence_id, epoch, entry)

    def send(self, at: int, sequence_id: int, epoch: int, entry: DraftEntry) -> None:
        """Send an entry; it arrives when it is delivered."""
        self.messages.append(Message(at, self._peers[at].session, pack_drafts([(sequence_id, epoch, entry)])))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Let a message arrive, in any order; `keep` lets it arrive once more later."""
        message = self.messages[index] if keep else self.messages.pop(index)
        entries, num_malformed = unpack_drafts(message.drafts, VOCAB)
        peer = self._peers[message.at]
        # A message on a broken stream never arrives.
        if message.session is peer.session:
            peer.verifier.put(AddDrafts(message.session, tuple(entries), num_malformed))
            self.events["delivered again" if keep else "delivered"] += 1

    def lose(self, index: int) -> None:
        """Drop a message."""
        self.messages.pop(index)
        self.events["lost"] += 1
