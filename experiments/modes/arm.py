"""The arms of the comparison."""

from __future__ import annotations

from experiments.decoding.arm import Arm
from paceline.drafts import DrawRule
from paceline.sampling.params import VerifyMode

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
