"""Confidences of draft tokens, learned from what became of earlier ones.

Responsible for: which calibrator a sequence uses, feeding it with what a step verified, and the packed form in which
outcomes are reported. One calibrator serves one drafter in one mode: under shared noise a drafter's pick is accepted
far more often than its probability says, greedily hardly so. Of drawn tokens it sees what was said before they were
drawn (`SiblingDraws.confidence`), and nothing where nothing was. Block verification has none: how many tokens it takes
may not depend on any.

Deliberately does not know: the wire, metrics. Filled by the step loop, on its thread; errors may be read from others.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract.limits import MAX_DRAFT_LENGTH
from paceline.sampling import VerifyMode
from paceline.scheduling.calibration import AcceptanceSample, Calibrator, Node
from paceline.trie import DraftTree

_MODES = (VerifyMode.GREEDY, VerifyMode.COUPLED, VerifyMode.TYPICAL, VerifyMode.REJECTION)
MAX_POSITION = MAX_DRAFT_LENGTH - 1


class Calibrators:
    """The calibrators of one verifier.

    Attributes:
        drafter: whose drafts they see, for people: the method of a drafter in this process, or "separate".
    """

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self._by_mode = {mode: Calibrator() for mode in _MODES}

    def of(self, mode: VerifyMode) -> Calibrator | None:
        """The calibrator of a mode, None for one that must not have any."""
        return self._by_mode.get(mode)

    def errors(self) -> dict[tuple[str, str], float]:
        """Expected calibration errors by (mode, kind) of the modes that saw any drafts.

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


def learn(calibrator: Calibrator | None, tree: DraftTree, accepted_rows: Sequence[int]) -> tuple[int, ...]:
    """Feed a verified tree to a calibrator.

    Args:
        calibrator: None learns nothing.
        tree: what was verified; without claims there is nothing to learn either.
        accepted_rows: row i + 1 is node i.

    Returns:
        Its outcomes, packed as in paceline.v1.StepReport.
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
    return tuple(packed(outcome) for outcome in calibrator.observe(nodes))


def packed(outcome: AcceptanceSample) -> int:
    """Position (6 bits), own and calibrated probability in 1/255 (8 bits each), accepted (1 bit)."""
    position = min(outcome.position, MAX_POSITION)
    own, calibrated = round(255 * min(outcome.own, 1.0)), round(255 * outcome.calibrated)
    return position << 17 | own << 9 | calibrated << 1 | outcome.is_accepted
