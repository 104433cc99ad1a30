"""A world of verifiers, drafters and one conductor, with a transport that delays, repeats, loses and reorders drafts.

The verifiers' and drafters' parts are the real ones; the transport and the conductor are ours, so that a test decides
what happens when. What each sequence commits is compared with its plain text as it comes in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry
from paceline.methods.drafter import Drafter, DraftRequest, OutcomeRequest
from paceline.methods.loading import load_drafter
from paceline.sampling import SamplingParams
from paceline.target import TargetEngine
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.runtime import tensors
from services.runtime.frames import pack_drafts, unpack_drafts
from services.verifier.colocated import ColocatedDrafter
from services.verifier.inbox import AddDrafts, Attach, Close, CloseSession, Open, SetPolicy
from services.verifier.sequence import SequenceSpec
from tests.simulation.texts import TIE, PlainText, PlainTexts
from tests.simulation.verifier import ListedSession, ListedSubscriber, SteppedVerifier

VOCAB = 97
MAX_NEW_TOKENS = 40
MAX_ENTRY_TOKENS = 24
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.3, seed=12, top_k=20),
    SamplingParams(temperature=1.0, seed=13, top_p=0.9),
    # Three tokens alone, so that the text repeats itself, and sometimes does not.
    SamplingParams(temperature=0.0, logit_bias=((5, 90.0), (6, 90.0), (9, 90.0))),
)
Placement = Literal[
    "separate-eagle3",
    "separate-independent",
    "separate-medusa1",
    "colocated-eagle3",
    "colocated-independent",
    "colocated-medusa1",
    "none",
]


def _prompts(texts: PlainTexts) -> list[tuple[int, ...]]:
    """Prompts of 1 to 60 tokens, many of which begin alike; some go on from another one's answer."""
    random = torch.Generator().manual_seed(3)
    base = torch.randint(3, VOCAB, (60,), generator=random).tolist()
    own = [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in (1, 2, 9, 23)]
    heads = [base[:cut] for cut in (8, 17, 33, 47, 60)]
    branches = [[*base[:cut], 5, 6, 7] for cut in (17, 33)]
    answered = [[*base[:17], *texts.of(base[:17], sampling).tokens[:12], 9] for sampling in SAMPLINGS[:2]]
    return [tuple(prompt) for prompt in (*own, *heads, *branches, *answered)]


@dataclass
class Kit:
    """What worlds share: loading it takes a second."""

    engines: list[TargetEngine]
    texts: PlainTexts
    prompts: list[tuple[int, ...]]
    drafters: dict[str, Drafter]

    @classmethod
    def load(cls, target_dir: Path, drafter_dirs: Mapping[str, Path]) -> Kit:
        """Load everything in float32; the first of the drafters reads features, and others none or the same."""
        drafters = {
            f"{placement}-{name}": load_drafter(path, target_dir, dtype=torch.float32)
            for name, path in drafter_dirs.items()
            for placement in ("separate", "colocated")
        }
        tap = next(iter(drafters.values())).tap
        assert tap is not None
        engines = [TargetEngine.load(target_dir, dtype=torch.float32, taps=[tap]) for _ in range(2)]
        texts = PlainTexts(TargetEngine.load(target_dir, dtype=torch.float32), MAX_NEW_TOKENS)
        return cls(engines, texts, _prompts(texts), drafters)


@dataclass(eq=False)
class Request:
    """One request as the conductor sees it.

    Attributes:
        at: index of the verifier that has it.
        sequence_id: the verifier's id, 0 until it has said so.
        is_tied: its text left the plain one at a tie; what follows cannot be compared.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    plain: PlainText
    max_new_tokens: int
    max_draft_nodes: int
    stop_token_ids: frozenset[int]
    at: int
    key: int = 0
    sequence_id: int = 0
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    is_cancelled: bool = False
    is_tied: bool = False

    @property
    def is_done(self) -> bool:
        """Nothing more will come."""
        return bool(self.finish) or self.is_cancelled

    @property
    def expected(self) -> tuple[int, ...]:
        """The whole text, cut at its first stop token or limit."""
        tokens = self.plain.tokens[: self.max_new_tokens]
        for place, token in enumerate(tokens):
            if token in self.stop_token_ids:
                return tokens[: place + 1]
        return tokens

    def commit(self, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens, and compare them with the plain text."""
        assert not self.is_done, "tokens after the end"
        assert start == len(self.prompt) + len(self.tokens), f"tokens from {start}, not in order"
        for token in tokens:
            place = len(self.tokens)
            self.tokens.append(token)
            if self.is_tied or (place < len(self.expected) and token == self.expected[place]):
                continue
            gap = self.plain.gaps[place] if place < len(self.expected) else 1.0
            assert gap < TIE, (
                f"token {place} of {self.prompt} is not the plain one (gap {gap:g}): {self.tokens}"
            )
            self.is_tied = True


@dataclass(frozen=True)
class Message:
    """Draft entries on their way to a verifier."""

    at: int
    session: ListedSession
    drafts: peer_pb2.DraftBatch


@dataclass
class Peer:
    """A verifier with its placement, its stream, and the drafter that follows it from elsewhere."""

    verifier: SteppedVerifier
    placement: Placement
    session: ListedSession
    subscriber: ListedSubscriber
    remote: Drafter | None
    followed: dict[int, Request] = field(default_factory=dict)


class World:
    """All of it.

    Attributes:
        events: what has happened, by name: a test that proves something must see that it did.
    """

    def __init__(
        self,
        kit: Kit,
        placements: Sequence[Placement],
        prefix_bytes: Sequence[int],
        lookups: Sequence[int] = (0, 0),
    ) -> None:
        self.kit = kit
        self.events: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.messages: list[Message] = []
        self.peers = [
            self._peer(*of_peer)
            for of_peer in zip(kit.engines, placements, prefix_bytes, lookups, strict=True)
        ]
        self._num_keys = 0

    def _peer(self, engine: TargetEngine, placement: Placement, prefix_bytes: int, ngram_tokens: int) -> Peer:
        drafter = self.kit.drafters.get(placement)
        is_colocated = placement.startswith("colocated")
        verifier = SteppedVerifier(
            engine,
            drafter=ColocatedDrafter(drafter) if is_colocated and drafter is not None else None,
            prefix_cache_bytes=prefix_bytes,
            ngram_tokens=ngram_tokens,
        )
        subscriber = ListedSubscriber("drafter")
        verifier.features.subscribe(subscriber)
        return Peer(verifier, placement, ListedSession(), subscriber, None if is_colocated else drafter)

    # Requests.

    @property
    def open_requests(self) -> list[Request]:
        """Those that have not ended."""
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
        """Its reader went away."""
        if request.sequence_id:
            peer = self.peers[request.at]
            peer.verifier.put(Close(peer.session, request.sequence_id))
            self._unfollow(peer, request)
        request.is_cancelled = True
        self.events["cancelled"] += 1

    def move(self, request: Request, at: int) -> None:
        """To another verifier, or out of this one and in again, with all it has so far."""
        if request.sequence_id:
            peer = self.peers[request.at]
            peer.verifier.put(Close(peer.session, request.sequence_id))
            self._unfollow(peer, request)
            self.events["moved"] += 1
            self._set_back(request, at)

    def lose_stream(self, at: int) -> None:
        """A verifier's stream breaks: all that was open on it goes on, here or there."""
        peer = self.peers[at]
        peer.verifier.put(CloseSession(peer.session))
        peer.session = ListedSession()
        for place, request in enumerate([r for r in self.open_requests if r.at == at]):
            self._unfollow(peer, request)
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
        """Another draft length, node budget or prefill chunk."""
        self.peers[at].verifier.put(SetPolicy(policy))

    def preempt(self, at: int) -> None:
        """Take the youngest one's slot, as if room had run out."""
        if self.peers[at].verifier.table.running:
            with torch.inference_mode():
                self.peers[at].verifier.table.preempt_youngest()

    def step(self, at: int) -> int:
        """One step of a verifier, and what it says."""
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
        self._unfollow(peer, request)
        if request.is_tied:
            self.events["tied"] += 1
            return
        assert tuple(request.tokens) == request.expected
        is_stopped = request.tokens[-1] in request.stop_token_ids
        assert reason == (
            sampling_pb2.FINISH_REASON_STOP if is_stopped else sampling_pb2.FINISH_REASON_LENGTH
        )
        self.events["finished"] += 1

    def _unfollow(self, peer: Peer, request: Request) -> None:
        peer.followed.pop(request.sequence_id, None)
        if peer.remote is not None:
            peer.remote.close(request.sequence_id)

    # Drafts.

    def draft_remotely(self, at: int, num_tokens: int, max_nodes: int) -> None:
        """Let the drafter that follows a verifier draft for all its sequences; the answers are on their way then."""
        peer = self.peers[at]
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
        for wish, entry in zip(wanted, peer.remote.draft(wanted), strict=True):
            if entry is not None:
                self.events["drafted by a real drafter"] += 1
                self.send(at, wish.sequence_id, peer.followed[wish.sequence_id].epoch, entry)

    def draft_past_outcomes(self, at: int, num_tokens: int, max_outcomes: int, num_partitions: int) -> None:
        """Let it draft past likely outcomes of its last drafts, in as many messages as drafters would share them."""
        peer = self.peers[at]
        if peer.remote is None:
            return
        for share in range(num_partitions):
            wanted = [
                OutcomeRequest(
                    sequence_id, num_tokens, max_outcomes, 64, request.sampling, share, num_partitions
                )
                for sequence_id, request in peer.followed.items()
                if request.max_draft_nodes
            ]
            for wish, entry in zip(wanted, peer.remote.draft_outcomes(wanted), strict=True):
                if entry is not None and entry.tokens:
                    self.events["drafted past an outcome"] += 1
                    self.send(at, wish.sequence_id, peer.followed[wish.sequence_id].epoch, entry)

    def draft_by_script(
        self, request: Request, offset: int, length: int, spoilt: Sequence[int], branches: int, age: int
    ) -> None:
        """The truth, spoilt at some places, from `offset` tokens behind or ahead of what is committed.

        Args:
            offset: added to the number of committed tokens.
            spoilt: places whose token is another one.
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
        """Put an entry on its way."""
        self.messages.append(Message(at, self.peers[at].session, pack_drafts([(sequence_id, epoch, entry)])))

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Let a message arrive, out of turn or not; `keep` lets it arrive once more later."""
        message = self.messages[index] if keep else self.messages.pop(index)
        entries, num_malformed = unpack_drafts(message.drafts, VOCAB)
        peer = self.peers[message.at]
        # What was sent on a stream that broke never arrives.
        if message.session is peer.session:
            peer.verifier.put(AddDrafts(message.session, tuple(entries), num_malformed))
            self.events["delivered again" if keep else "delivered"] += 1

    def lose(self, index: int) -> None:
        """A message never arrives."""
        self.messages.pop(index)
        self.events["lost"] += 1

    # The end.

    def run_out(self) -> None:
        """Let everything end, and see that nothing is left behind."""
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
        """Free what an example that failed has left, so that the next one starts clean."""
        for peer in self.peers:
            with torch.inference_mode():
                for sequence in [*peer.verifier.table.running, *peer.verifier.table.waiting]:
                    peer.verifier.table.drop(sequence)
                while peer.verifier.table.kv_allocator.evict():
                    pass
            peer.verifier.limit_kv(None)
            for request in list(peer.followed.values()):
                self._unfollow(peer, request)
