"""The arms of the comparison: a mode, and how its drafts are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.sampling import SUPPORT_SIZE, VerifyMode
from paceline.trie import DrawRule


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table.

    Attributes:
        name: of the row.
        mode: verification mode.
        rule: how drafted tokens are chosen, in modes that verify draws.
        branches: drafts have more nodes than their depth.
        support_size: most tokens that a token is drawn from.
    """

    name: str
    mode: VerifyMode
    rule: DrawRule | None = None
    branches: bool = False
    support_size: int = SUPPORT_SIZE


_WITH, _WITHOUT, _TOP = DrawRule.WITH_REPLACEMENT, DrawRule.WITHOUT_REPLACEMENT, DrawRule.TOP

ARMS = (
    Arm("coupled, chain", VerifyMode.COUPLED),
    Arm("coupled, tree", VerifyMode.COUPLED, branches=True),
    Arm("rejection, chain, drawn", VerifyMode.REJECTION, _WITHOUT),
    Arm("rejection, chain, likeliest", VerifyMode.REJECTION, _TOP),
    Arm("block, chain, drawn", VerifyMode.BLOCK, _WITHOUT),
    Arm("block, chain, likeliest", VerifyMode.BLOCK, _TOP),
    Arm("typical, chain", VerifyMode.TYPICAL),
    Arm("rejection, tree, drawn without replacement", VerifyMode.REJECTION, _WITHOUT, branches=True),
    Arm("rejection, tree, drawn with replacement", VerifyMode.REJECTION, _WITH, branches=True),
    Arm("rejection, tree, likeliest", VerifyMode.REJECTION, _TOP, branches=True),
    Arm("typical, tree", VerifyMode.TYPICAL, branches=True),
)

SUPPORT_ARMS = tuple(
    Arm(f"rejection, chain, drawn from {size}", VerifyMode.REJECTION, _WITHOUT, support_size=size)
    for size in (4, 8, 16, 64, 256)
)

GREEDY_ARMS = (
    Arm("greedy, chain", VerifyMode.GREEDY),
    Arm("greedy, tree", VerifyMode.GREEDY, branches=True),
)
