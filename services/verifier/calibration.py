"""Confidences of draft tokens, learned from what became of earlier draft tokens.

Responsible for: which calibrator a sequence uses, the confidences of new entries, feeding verified trees to
calibrators, and the packed form in which acceptance samples are reported.

One calibrator serves one drafter in one mode: with shared noise a drafter's pick is accepted far more often than its
probability says, greedily hardly so. For drawn tokens a calibrator sees only the confidence stated before the draw
(`SiblingDraws.confidence`). Block verification has no calibrator: how many tokens it verifies may depend on no
confidence.

Deliberately does not know: the wire, metrics.

Called by: the step loop's stages on its thread; other threads may read the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.sampling.params import VerifyMode
from paceline.scheduling.calibration import AcceptanceSample, Calibrator, Node

_MODES = (VerifyMode.GREEDY, VerifyMode.COUPLED, VerifyMode.TYPICAL, VerifyMode.REJECTION)
MAX_POSITION = MAX_DRAFT_LENGTH - 1


class Calibrators:
    """The calibrators of one verifier.

    Attributes:
        drafter: label of the drafter for metrics: the method of a drafter in this process, or "separate".
    """

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self._by_mode = {mode: Calibrator() for mode in _MODES}

    def of(self, mode: VerifyMode) -> Calibrator | None:
        """The calibrator of a mode; None for a mode that must not have one."""
        return self._by_mode.get(mode)

    def errors(self) -> dict[tuple[str, str], float]:
        """Expected calibration errors by (mode, kind), for modes with drafts.

        Kinds are "own" (the drafter's probabilities), "token" (the confidences used) and "path" (their products).
        """
        return {
            (mode.value, kind): error.value
            for mode, calibrator in self._by_mode.items()
            for kind, error in (
                ("own", calibrator.own_error),
                ("token", calibrator.token_error),
                ("path", calibrator.path_error),
            )
            if error.count
        }


def calibrated(entry: DraftEntry, calibrator: Calibrator | None) -> DraftEntry:
    """The entry with confidences from the drafter's claims; the same entry without a calibrator or without claims."""
    num_tokens = len(entry.tokens)
    num_draws = len(entry.draft_dists or entry.tokens)
    has_claims = (
        len(entry.log_probs) == len(entry.parents) == num_draws == num_tokens and not entry.confidences
    )
    if calibrator is None or not num_tokens or not has_claims:
        return entry
    own = [
        0.0 if claim is None else calibrator.confidence(claim.log_prob, claim.position)
        for claim in entry.claims()
    ]
    # Among drawn siblings only the first has a claim; its confidence counts for all of them.
    of_first_draw: dict[int, float] = {}
    for parent, confidence, draws in zip(entry.parents, own, entry.draft_dists or (), strict=False):
        if draws is not None:
            of_first_draw.setdefault(parent, confidence)
    confidences = (
        of_first_draw.get(parent, confidence) for parent, confidence in zip(entry.parents, own, strict=True)
    )
    return replace(entry, confidences=tuple(confidences))


def learn(calibrator: Calibrator | None, tree: DraftTree, accepted_rows: Sequence[int]) -> tuple[int, ...]:
    """Feed a verified tree to a calibrator.

    Args:
        calibrator: None learns nothing.
        tree: the verified tree; without claims there is nothing to learn.
        accepted_rows: row i + 1 is node i.

    Returns:
        The acceptance samples, packed as in paceline.v1.StepReport.
    """
    if calibrator is None or not tree.claims:
        return ()
    accepted = set(accepted_rows)
    nodes = [
        Node(
            parent,
            None if claim is None else claim.log_prob,
            0 if claim is None else claim.position,
            path_acceptance,
            row in accepted,
        )
        for row, (parent, claim, path_acceptance) in enumerate(
            zip(
                tree.parents, tree.claims, tree.drafter_path_acceptances or tree.path_acceptances, strict=True
            ),
            start=1,
        )
    ]
    return tuple(packed(sample) for sample in calibrator.observe(nodes))


def packed(sample: AcceptanceSample) -> int:
    """Position (6 bits), own and calibrated probability in 1/255 (8 bits each), accepted (1 bit)."""
    position = min(sample.position, MAX_POSITION)
    own, calibrated = round(255 * min(sample.own, 1.0)), round(255 * sample.calibrated)
    return position << 17 | own << 9 | calibrated << 1 | sample.is_accepted
