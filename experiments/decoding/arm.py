"""How one generation is drafted for and verified."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafts import DrawRule
from paceline.sampling.draws import SUPPORT_SIZE
from paceline.sampling.params import VerifyMode


@dataclass(frozen=True, slots=True)
class Arm:
    """A mode, and how drafts for it are chosen.

    Attributes:
        name: for people.
        mode: verification mode.
        rule: how drafted tokens are chosen, in modes that verify draws.
        branches: drafts have more nodes than their depth.
        support_size: most tokens that a token is drawn from.
        reads_features: drafts read the target's features, where the drafter reads any.
    """

    name: str
    mode: VerifyMode
    rule: DrawRule | None = None
    branches: bool = False
    support_size: int = SUPPORT_SIZE
    reads_features: bool = True
