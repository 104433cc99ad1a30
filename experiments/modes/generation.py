"""One generation in one process: target, drafter, wire form and verification, without services around them.

Responsible for: the round that the services make (choose, run, judge, keep, commit, feed, draft), on the verifier's own
parts, with each draft packed and unpacked as on the wire. Deliberately does not know time: what is counted here does
not depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from experiments.modes.arm import Arm
from paceline.drafters import Drafter, DraftRequest
from paceline.sampling import FinalKind, SamplingParams, Verdict
from paceline.scheduling.calibration import Calibrator
from paceline.target import SequenceRows, TargetEngine
from paceline.trie import DraftTree
from services.runtime.frames import pack_drafts, unpack_drafts
from services.verifier.sequence import Finish, SequenceSpec, SequenceState, TargetSequence
from services.verifier.session import Session
from services.verifier.verdicts import judge


@dataclass(slots=True)
class Tally:
    """Counts over generations.

    Attributes:
        sum_squares: of the tokens of each pass.
        drafted_at: passes that verified a token at depth i + 1.
        accepted_at: passes that accepted one.
        num_sent: drafted tokens packed.
        num_sent_bytes: what they took on the wire, framing of their batch included.
    """

    num_passes: int = 0
    num_tokens: int = 0
    sum_squares: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_sent_bytes: int = 0

    def add_pass(self, num_tokens: int, depth: int, num_accepted: int) -> None:
        """Count a pass that drafted to `depth` and committed `num_tokens`."""
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.sum_squares += num_tokens**2
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for place in range(reached):
                counts[place] += 1

    @property
    def tokens_per_pass(self) -> float:
        """1 is plain decoding."""
        return self.num_tokens / max(1, self.num_passes)

    @property
    def standard_error(self) -> float:
        """Of `tokens_per_pass`, passes taken as independent."""
        num_passes = max(1, self.num_passes)
        variance = self.sum_squares / num_passes - self.tokens_per_pass**2
        return float((max(variance, 0.0) / num_passes) ** 0.5)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the passes that verified a depth that accepted it too."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def bytes_per_token(self) -> float:
        """Bytes for a drafted token on the wire."""
        return self.num_sent_bytes / max(1, self.num_sent)


def generate(
    engine: TargetEngine,
    drafter: Drafter,
    prompt: Sequence[int],
    arm: Arm,
    sampling: SamplingParams,
    *,
    draft_length: int,
    max_nodes: int,
    max_tokens: int,
    stop_token_ids: frozenset[int],
    tally: Tally,
    calibrator: Calibrator | None = None,
    watch: Callable[[DraftTree, Verdict], None] = lambda tree, verdict: None,
) -> list[int]:
    """Generate after a prompt and count into `tally`; the tokens that came.

    Args:
        engine: the target, with the drafter's tap.
        drafter: made for it.
        prompt: at least two token ids.
        arm: mode and draws.
        sampling: temperature, filters and seed; the arm's mode is put in.
        draft_length: tokens in a row.
        max_nodes: nodes of a draft, where the arm branches.
        max_tokens: most tokens to generate.
        stop_token_ids: tokens that end it.
        tally: is added to.
        calibrator: of the drafter's probabilities, as in a verifier; None takes them as they are.
        watch: is called with each tree that was verified, and what came of it.
    """
    spec = SequenceSpec(1, 0, tuple(prompt), sampling, max_tokens, stop_token_ids, max_nodes)
    owner = Session(asyncio.new_event_loop(), "modes")  # nothing is sent
    vocab = engine.shape.vocab_size
    with torch.inference_mode():
        slot = engine.open(len(prompt) + max_tokens)
        sequence = TargetSequence(1, spec, owner, engine.shape.max_positions, vocab, slot)
        sequence.calibrator = calibrator
        sequence.move_to(SequenceState.RUNNING)
        drafter.open(1, prompt)
        try:
            finish = Finish.NOT_YET
            while finish is Finish.NOT_YET:
                finish = _round(engine, drafter, sequence, arm, draft_length, max_nodes, tally, watch)
        finally:
            drafter.close(1)
            engine.close(slot)
    return sequence.committed[len(prompt) :]


def _round(
    engine: TargetEngine,
    drafter: Drafter,
    sequence: TargetSequence,
    arm: Arm,
    draft_length: int,
    max_nodes: int,
    tally: Tally,
    watch: Callable[[DraftTree, Verdict], None],
) -> Finish:
    """One target pass and the draft behind it."""
    budget = max_nodes if arm.branches else draft_length
    tree = sequence.choose_tree(budget)
    settled = sequence.committed[sequence.num_cached :]
    root = len(settled) - 1
    parents = [*range(-1, root), *(root if p < 0 else root + 1 + p for p in tree.parents)]
    rows = [*settled, *tree.tokens]
    output = engine.step(
        [SequenceRows(sequence.slot, rows, parents if len(tree) else None, range(root, len(rows)))]
    )
    (verdict,) = judge([sequence], [tree], [output.logits[0]])
    assert isinstance(verdict, Verdict), "no request here has rules"
    watch(tree, verdict)
    kept = [*range(len(settled)), *(root + row for row in verdict.accepted_rows)]
    engine.keep(sequence.slot, kept)
    first = sequence.num_cached
    sequence.num_cached += len(kept)
    start = sequence.committed_length
    tokens, finish, _ = sequence.commit(
        verdict.committed_tokens, is_whole_draft=verdict.kind is not FinalKind.RECOVERED
    )
    tally.add_pass(len(tokens), max(tree.depths, default=0), min(len(verdict.accepted_tokens), len(tokens)))
    if finish is not Finish.NOT_YET:
        return finish
    drafter.extend(1, start, tokens)
    if drafter.tap is not None:
        drafter.feed(1, first, output.features[0][kept])
    num_tokens = min(draft_length, sequence.num_tokens_left - 1)
    if num_tokens > 0:
        request = DraftRequest(
            1,
            num_tokens,
            max_nodes if arm.branches else 0,
            sequence.spec.sampling,
            rule=arm.rule,
            support_size=arm.support_size,
        )
        (entry,) = drafter.draft([request])
        if entry is not None:
            batch = pack_drafts([(1, 0, entry)])
            tally.num_sent += len(entry.tokens)
            tally.num_sent_bytes += batch.ByteSize()
            ((_, _, received),), _ = unpack_drafts(batch, engine.shape.vocab_size)
            sequence.add_draft(received)
    return finish
