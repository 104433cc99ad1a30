"""When a decision is published, and under which version.

Versions are unix milliseconds at the time of the decision, raised where needed so that each is above every earlier
version that this process or Redis knows. So versions rise even when scheduler and Redis both restart empty, which a
counter would not do.
"""

from __future__ import annotations

from paceline.contract.policy import SpeculationPolicy

_WAIT_TOLERANCE = 0.15
"""Fraction by which measured round trips, and wait budgets with them, move all the time."""


def is_change(candidate: SpeculationPolicy, published: SpeculationPolicy) -> bool:
    """Whether a decision is worth a publication; a wait budget that moved a little is not."""
    return candidate.differs_from(published, _WAIT_TOLERANCE)


def next_version(unix_ms: int, newest_known: int) -> int:
    """The version of a decision made now (see the module's docstring)."""
    return max(unix_ms, newest_known + 1)
