"""A world of verifiers, drafters and one conductor, with a transport that delays, repeats, loses and reorders drafts.

The verifiers' and drafters' parts are the real ones; the transport and the conductor are ours, so that a test decides
what happens when. Each committed token is compared with the plain text as it arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from paceline.contract.policy import StepPolicy
from paceline.v1 import sampling_pb2, target_pb2
from services.verifier.inbox import Attach, Close, CloseSession, Open, SetPolicy
from services.verifier.specs import SequenceSpec
from tests.simulation.kit import MAX_NEW_TOKENS, SAMPLINGS, Kit, Placement
from tests.simulation.peer import Peer
from tests.simulation.request import Request
from tests.simulation.traffic import DraftTraffic
from tests.simulation.verifier import ListedSession


class World:
    """Verifiers, drafters, requests and the conductor that moves them.

    Attributes:
        events: counts what happened, by name: a test must see that what it is about did happen.
        traffic: the draft messages on their way.
    """

    def __init__(
        self,
        kit: Kit,
        placements: Sequence[Placement],
        prefix_bytes: Sequence[int],
        ngram_tokens: Sequence[int] = (0, 0),
    ) -> None:
        self.kit = kit
        self.events: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.peers = [
            Peer.build(engine, kit.drafters.get(placement), placement, num_bytes, num_tokens)
            for engine, placement, num_bytes, num_tokens in zip(
                kit.engines, placements, prefix_bytes, ngram_tokens, strict=True
            )
        ]
        self.traffic = DraftTraffic(self.peers, self.events)
        self._num_keys = 0

    # Requests.

    @property
    def open_requests(self) -> list[Request]:
        """Requests that have not ended."""
        return [request for request in self.requests if not request.is_done]

    def open(
        self, prompt: int, sampling: int, max_new_tokens: int, max_draft_nodes: int, at: int, *, stops: bool
    ) -> Request:
        """Start a request."""
        tokens, params = self.kit.prompts[prompt], SAMPLINGS[sampling]
        plain = self.kit.texts.of(tokens, params)
        stop = frozenset({plain.tokens[max_new_tokens // 2]}) if stops else frozenset[int]()
        request = Request(tokens, params, plain, max_new_tokens, max_draft_nodes, stop, at)
        self.requests.append(request)
        self._send_open(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request, as if its client went away."""
        if request.sequence_id:
            peer = self.peers[request.at]
            peer.verifier.put(Close(peer.session, request.sequence_id))
            peer.unfollow(request)
        request.is_cancelled = True
        self.events["cancelled"] += 1

    def move(self, request: Request, at: int) -> None:
        """Move a request with its text to another verifier, or close it and open it again at the same one."""
        if request.sequence_id:
            peer = self.peers[request.at]
            peer.verifier.put(Close(peer.session, request.sequence_id))
            peer.unfollow(request)
            self.events["moved"] += 1
            self._set_back(request, at)

    def lose_stream(self, at: int) -> None:
        """Break a verifier's stream; its requests are opened again, here or at other verifiers."""
        peer = self.peers[at]
        peer.verifier.put(CloseSession(peer.session))
        peer.session = ListedSession()
        for place, request in enumerate([r for r in self.open_requests if r.at == at]):
            peer.unfollow(request)
            self._set_back(request, (at + place) % len(self.peers))
        self.events["stream lost"] += 1

    def _set_back(self, request: Request, at: int) -> None:
        request.at, request.sequence_id = at, 0
        request.epoch += 1
        self._send_open(request)

    def _send_open(self, request: Request) -> None:
        self._num_keys += 1
        request.key = self._num_keys
        spec = SequenceSpec(
            key=request.key,
            epoch=request.epoch,
            prompt=(*request.prompt, *request.tokens),
            sampling=request.sampling,
            max_new_tokens=request.max_new_tokens - len(request.tokens),
            stop_token_ids=request.stop_token_ids,
            max_draft_nodes=request.max_draft_nodes,
        )
        peer = self.peers[request.at]
        peer.verifier.put(Open(peer.session, spec))

    # Steps.

    def set_policy(self, at: int, policy: StepPolicy) -> None:
        """Change draft length, node budget or prefill chunk."""
        self.peers[at].verifier.put(SetPolicy(policy))

    def preempt(self, at: int) -> None:
        """Take the youngest sequence's slot, as if the KV cache were full."""
        if self.peers[at].verifier.table.running:
            with torch.inference_mode():
                self.peers[at].verifier.table.preempt_youngest()

    def step(self, at: int) -> int:
        """Run one step of a verifier, and handle its frames."""
        peer = self.peers[at]
        num_steps = peer.verifier.step()
        for frame in peer.session.take():
            assert not frame.failures, frame.failures
            for opened in frame.opened:
                self._opened(at, opened)
            if frame.HasField("step"):
                self._step(peer, frame.step)
        return num_steps

    def _opened(self, at: int, opened: target_pb2.SequenceOpened) -> None:
        peer = self.peers[at]
        request = next((r for r in self.open_requests if r.key == opened.key), None)
        if request is None:  # cancelled meanwhile
            peer.verifier.put(Close(peer.session, opened.sequence_id))
            return
        assert (request.at, request.epoch) == (at, opened.epoch)
        request.sequence_id = opened.sequence_id
        peer.followed[opened.sequence_id] = request
        if request.max_draft_nodes and peer.remote is not None:
            peer.verifier.put(Attach(peer.session, opened.sequence_id, "drafter", 0))
            peer.remote.open(opened.sequence_id, [*request.prompt, *request.tokens])

    def _step(self, peer: Peer, step: target_pb2.StepReport) -> None:
        commits, begin = step.commits, 0
        for which, sequence_id in enumerate(commits.sequence_ids):
            tokens = commits.tokens[begin : begin + commits.sizes[which]]
            begin += commits.sizes[which]
            request = peer.followed.get(sequence_id)
            if request is None:  # cancelled or moved meanwhile
                continue
            assert commits.epochs[which] == request.epoch
            request.commit(commits.starts[which], tokens)
            self.events["accepted"] += step.num_accepted_tokens[which]
            self.events["hit"] += step.cache_hits[which]
            num_ngram = step.num_accepted_tokens[which] - step.num_accepted_of_drafter[which]
            self.events["n-gram accepted"] += num_ngram
            self.events["refused"] += step.num_draft_tokens[which] - step.num_accepted_tokens[which]
            if step.finish_reasons[which]:
                self._finish(peer, request, step.finish_reasons[which])
            elif request.max_draft_nodes and peer.remote is not None:
                peer.remote.extend(sequence_id, commits.starts[which], tokens)
        self.events["stale"] += step.dropped.stale
        self.events["old epoch"] += step.dropped.old_epoch
        self.events["ahead"] += step.dropped.ahead

    def _finish(self, peer: Peer, request: Request, reason: int) -> None:
        request.finish = reason
        peer.unfollow(request)
        if request.is_tied:
            self.events["tied"] += 1
            return
        assert tuple(request.tokens) == request.expected
        is_stopped = request.tokens[-1] in request.stop_token_ids
        assert reason == (
            sampling_pb2.FINISH_REASON_STOP if is_stopped else sampling_pb2.FINISH_REASON_LENGTH
        )
        self.events["finished"] += 1

    # The end.

    def run_out(self) -> None:
        """Let all requests end, and check that nothing is left behind."""
        for _ in range(MAX_NEW_TOKENS * (len(self.requests) + 2) * 2):
            if not self.open_requests and not any(p.verifier.table.num_unfinished for p in self.peers):
                break
            for at in range(len(self.peers)):
                self.step(at)
        assert not self.open_requests, "a request never ended"
        for peer in self.peers:
            peer.verifier.step()
            peer.verifier.close()
            stats = peer.verifier.kv_allocator
            self.events["preempted"] += stats.num_preemptions
            self.events["prefix adopted"] += stats.num_adopted
            self.events["prefix copied"] += stats.num_copied

    def abandon(self) -> None:
        """Free what a failed example left, so that the next one starts clean."""
        for peer in self.peers:
            with torch.inference_mode():
                for sequence in [*peer.verifier.table.running, *peer.verifier.table.waiting]:
                    peer.verifier.table.drop(sequence)
                while peer.verifier.table.kv_allocator.evict():
                    pass
            peer.verifier.limit_kv(None)
            for request in list(peer.followed.values()):
                peer.unfollow(request)
