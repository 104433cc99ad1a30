"""One generation in one process: target, drafter, wire form and verification, without services around them.

Responsible for: the round that the services make (choose, run, judge, keep, commit, feed, draft), on the verifier's own
parts, with each draft packed and unpacked as on the wire, and for saying what each pass did, took and would have sent.
Packing stands outside of the times. Deliberately does not know: what is counted or compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from experiments.decoding.arm import Arm
from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.methods.drafter import Drafter, DraftRequest
from paceline.sampling.params import SamplingParams
from paceline.sampling.verify import FinalKind, Verdict
from paceline.scheduling.calibration import Calibrator
from paceline.target import SequenceRows, TargetEngine
from paceline.v1 import peer_pb2, target_pb2
from services.runtime import feature_parts, tensors
from services.runtime.frames import pack_drafts, unpack_drafts
from services.verifier.sequence import TargetSequence
from services.verifier.sequence_state import Finish, TargetSequenceState
from services.verifier.session import VerifySession
from services.verifier.specs import SequenceSpec
from services.verifier.verification import verify_sequences


@dataclass(frozen=True, slots=True)
class Pass:
    """One target pass, and the draft behind it.

    Attributes:
        is_prompt: it ran the prompt, and nothing was drafted for it.
        tree: what was verified.
        verdict: what came of it.
        tokens: committed; fewer than the verdict's where the text ended before them.
        draft: what the drafter sent afterwards, None where it sent nothing.
        verify_s: seconds of the pass and of all that the verifier does for it.
        draft_s: seconds of the drafter: what was committed taken in, and the draft.
        num_feature_bytes: the features' own bytes, without framing.
        num_bytes_to_drafter: features and commit, as frames; 0 where the text ended.
        num_draft_bytes: the draft as a frame.
    """

    is_prompt: bool
    tree: DraftTree
    verdict: Verdict
    tokens: tuple[int, ...]
    draft: DraftEntry | None = None
    verify_s: float = 0.0
    draft_s: float = 0.0
    num_feature_bytes: int = 0
    num_bytes_to_drafter: int = 0
    num_draft_bytes: int = 0

    @property
    def num_accepted(self) -> int:
        """Drafted tokens among the committed."""
        return min(len(self.verdict.accepted_tokens), len(self.tokens))


def generate(
    engine: TargetEngine,
    drafter: Drafter | None,
    prompt: Sequence[int],
    arm: Arm,
    sampling: SamplingParams,
    *,
    draft_length: int,
    max_nodes: int,
    max_tokens: int,
    stop_token_ids: frozenset[int],
    calibrator: Calibrator | None = None,
    watch: Callable[[Pass], None] = lambda one: None,
) -> list[int]:
    """Generate after a prompt; the tokens that came.

    Args:
        engine: the target, with the drafter's tap.
        drafter: made for it; None decodes plainly.
        prompt: at least two token ids.
        arm: mode and draws.
        sampling: temperature, filters and seed, in the arm's mode.
        draft_length: tokens in a row.
        max_nodes: nodes of a draft, where the arm branches.
        max_tokens: most tokens to generate.
        stop_token_ids: tokens that end it.
        calibrator: of the drafter's probabilities, as in a verifier; None takes them as they are.
        watch: is called with each pass.
    """
    budget = 0 if drafter is None else max_nodes
    spec = SequenceSpec(1, 0, tuple(prompt), sampling, max_tokens, stop_token_ids, budget)
    loop = asyncio.new_event_loop()
    owner = VerifySession(loop, "decoding")  # nothing is sent
    vocab = engine.shape.vocab_size
    with torch.inference_mode():
        slot = engine.open(len(prompt) + max_tokens)
        sequence = TargetSequence(1, spec, owner, engine.shape.max_positions, vocab, slot)
        sequence.calibrator = calibrator
        sequence.move_to(TargetSequenceState.RUNNING)
        if drafter is not None:
            drafter.open(1, prompt)
        try:
            finish = Finish.NOT_YET
            while finish is Finish.NOT_YET:
                done, finish = _round(engine, drafter, sequence, arm, draft_length, max_nodes)
                watch(done)
        finally:
            if drafter is not None:
                drafter.close(1)
            engine.close(slot)
            loop.close()
    return sequence.committed[len(prompt) :]


def _round(
    engine: TargetEngine,
    drafter: Drafter | None,
    sequence: TargetSequence,
    arm: Arm,
    draft_length: int,
    max_nodes: int,
) -> tuple[Pass, Finish]:
    """One target pass and the draft behind it."""
    started_s = time.perf_counter()
    is_prompt = sequence.num_cached == 0
    tree = sequence.choose_tree(max_nodes if arm.branches else draft_length)
    settled = sequence.committed[sequence.num_cached :]
    root = len(settled) - 1
    parents = [*range(-1, root), *(root if p < 0 else root + 1 + p for p in tree.parents)]
    rows = SequenceRows(
        sequence.slot,
        [*settled, *tree.tokens],
        parents if len(tree) else None,
        range(root, len(settled) + len(tree)),
        wants_features=drafter is not None and arm.reads_features,
    )
    output = engine.step([rows])
    (verdict,) = verify_sequences([sequence], [tree], output.rows, [0])
    assert isinstance(verdict, Verdict), "no request here has rules"
    kept = [*range(len(settled)), *(root + row for row in verdict.accepted_rows)]
    engine.keep(sequence.slot, kept)
    first = sequence.num_cached
    sequence.num_cached += len(kept)
    start = sequence.committed_length
    tokens, finish, _ = sequence.commit(
        verdict.committed_tokens, is_whole_draft=verdict.kind is not FinalKind.RECOVERED
    )
    verified_s = time.perf_counter()
    done = Pass(is_prompt, tree, verdict, tuple(tokens), verify_s=verified_s - started_s)
    if drafter is None or finish is not Finish.NOT_YET:
        return done, finish
    features = output.features[0][kept] if drafter.tap is not None and arm.reads_features else None
    drafter.extend(1, start, tokens)
    if features is not None:
        drafter.feed(1, first, features)
    entry = None
    num_tokens = min(draft_length, sequence.num_tokens_left - 1)
    if num_tokens > 0:
        request = DraftRequest(
            1,
            num_tokens,
            max_nodes if arm.branches else 0,
            sequence.spec.sampling,
            rule=arm.rule,
            support_size=arm.support_size,
            reads_features=arm.reads_features,
        )
        (entry,) = drafter.draft([request])
    drafted_s = time.perf_counter()
    commits = peer_pb2.CommitBatch(
        sequence_ids=[1], epochs=[0], starts=[start], sizes=[len(tokens)], tokens=tokens
    )
    to_drafter = commits.ByteSize()
    num_feature_bytes = 0
    if features is not None and drafter.tap is not None:
        whole, recent = feature_parts.cut(features, drafter.tap.parts(engine.shape.hidden_size))
        frame = target_pb2.StreamFeaturesResponse(
            sequence_id=1,
            start=first,
            features=tensors.encode(whole),
            tokens=tokens,
            recent=[tensors.encode(part) for part in recent],
        )
        num_feature_bytes = sum(part.nbytes for part in (whole, *recent))
        to_drafter += frame.ByteSize()
    done = replace(
        done,
        draft=entry,
        draft_s=drafted_s - verified_s,
        num_feature_bytes=num_feature_bytes,
        num_bytes_to_drafter=to_drafter,
    )
    if entry is not None:
        batch = pack_drafts([(1, 0, entry)])
        done = replace(done, num_draft_bytes=batch.ByteSize())
        ((_, _, received),), _ = unpack_drafts(batch, engine.shape.vocab_size)
        sequence.add_draft(received)
    return done, finish
