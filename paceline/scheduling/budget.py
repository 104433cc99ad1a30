"""How many draft nodes each sequence of one step verifies.

Responsible for: the set of nodes that maximises expected committed tokens per second of this step, and the
table of step times that the choice reads.

Deliberately does not know: tokens, trees, the network (a draft that has not arrived has no nodes here).

Called by: the verifier, once per step. Its time counts as target time, so it is vectorised: one sort of all
nodes, running sums, one division by a slice of a table.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.scheduling.curves import bucket_of

Floats = npt.NDArray[np.float64]


class StepTable:
    """Step time over rows as an array, so that a choice costs one slice and not one call per row.

    Args:
        step_time: seconds of a step over that many rows. It is called once for each number of rows that a curve
            distinguishes (`bucket_of`); values in between are interpolated, which is exact for a `StepCurve`.
        max_rows: largest number of rows in the table. At least 1.
    """

    def __init__(self, step_time: Callable[[int], float], max_rows: int) -> None:
        knots = _knots(max_rows)
        times = np.array([step_time(rows) for rows in knots])
        if not np.all(np.isfinite(times)) or not np.all(times >= 0):
            raise ValueError("step times must be finite and not negative")
        self._seconds: Floats = np.interp(np.arange(max_rows + 1), knots, times)

    @property
    def max_rows(self) -> int:
        """Largest number of rows in the table."""
        return len(self._seconds) - 1

    def seconds(self, rows: int) -> float:
        """Seconds of a step.

        Raises:
            ValueError: more rows than the table has.
        """
        return float(self.range(rows, rows)[0])

    __call__ = seconds

    def range(self, first: int, last: int) -> Floats:
        """Seconds of steps over ``first`` to ``last`` rows, both included.

        Raises:
            ValueError: more rows than the table has.
        """
        if not 0 <= first <= last <= self.max_rows:
            raise ValueError(f"rows {first} to {last} of a table up to {self.max_rows}")
        return self._seconds[first : last + 1]


def allocate_nodes(
    path_acceptances: Sequence[Sequence[float]],
    step_time: Callable[[int], float],
    *,
    is_rejection: bool = False,
    other_rows: int = 0,
    overhead_s: float = 0.0,
    scale: float = 1.0,
    max_nodes: int | None = None,
) -> tuple[int, ...]:
    """Choose how many of each sequence's nodes to verify (DSpark, arXiv 2607.05147, Algorithm 1).

    Maximises (n + sum of chosen path acceptances) / (overhead + step_time(other_rows + n + chosen nodes)). For
    a fixed number of nodes the largest path acceptances are best. Path acceptances fall along every path, so
    that set contains the parent of each of its nodes, in a chain and in a tree. All numbers of nodes are
    evaluated, because a measured curve has plateaus and steps.

    In rejection mode the scan stops at the first number that does not improve. A path acceptance further down
    depends on the tokens above it, and reading it to decide about those tokens would bias what is committed. So
    whether a node is chosen depends on larger path acceptances alone: of its ancestors, of nodes of its
    sequence that rank before it, and of other sequences.

    Args:
        path_acceptances: per sequence, its nodes' path acceptances, falling, parents first (as
            `DraftTrie.select` returns them).
        step_time: seconds of a step over that many rows. A `StepTable` makes this fast.
        is_rejection: whether a sequence of the step is in a mode that verifies draws.
        other_rows: further rows in the step, such as prefill chunks.
        overhead_s: time per step that does not depend on rows, such as attention over the context, or a
            co-located drafter.
        scale: calibration: the factor by which true path acceptances are larger. A sequence's root counts 1
            regardless.
        max_nodes: most nodes to choose over all sequences; None for no limit.

    Returns:
        For each sequence how many of its first nodes to verify.
    """
    num_sequences = len(path_acceptances)
    if not num_sequences:
        return ()
    sizes = np.fromiter(map(len, path_acceptances), np.intp, num_sequences)
    num_nodes = int(sizes.sum())
    limit = num_nodes if max_nodes is None else min(num_nodes, max_nodes)
    if limit <= 0:
        return (0,) * num_sequences
    values: Floats = np.fromiter(itertools.chain.from_iterable(path_acceptances), np.float64, num_nodes)
    # Sorting values is three times as fast as ranking their indices. Ties matter only at the last value chosen.
    falling = np.negative(values)
    falling.sort()
    expected = np.empty(limit + 1)
    expected[0] = 0.0
    np.cumsum(falling[:limit], out=expected[1:])
    expected *= -scale
    expected += num_sequences
    rates = expected / (_seconds(step_time, other_rows + num_sequences, limit) + overhead_s)
    if is_rejection:
        improves = rates[1:] > rates[:-1]
        best = limit if improves.all() else int(improves.argmin())
    else:
        best = int(rates.argmax())
    if best == num_nodes:
        return tuple(sizes.tolist())
    if best == 0:
        return (0,) * num_sequences
    least = -falling[best - 1]
    is_chosen = values > least
    missing = best - int(np.count_nonzero(is_chosen))
    # Ties are taken in order, so that a parent is chosen before its children.
    is_chosen[np.flatnonzero(values == least)[:missing]] = True
    owners = np.repeat(np.arange(num_sequences), sizes)
    return tuple(np.bincount(owners[is_chosen], minlength=num_sequences).tolist())


def _seconds(step_time: Callable[[int], float], first: int, more: int) -> Floats:
    if isinstance(step_time, StepTable):
        return step_time.range(first, first + more)
    return np.array([step_time(first + count) for count in range(more + 1)])


@functools.lru_cache(maxsize=16)
def _knots(max_rows: int) -> tuple[int, ...]:
    """The row counts up to a limit that stand for a bucket of a curve, including 1 and the limit itself."""
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    buckets = {bucket_of(rows) for rows in range(1, max_rows + 1)}
    return tuple(sorted({bucket for bucket in buckets if bucket <= max_rows} | {1, max_rows}))
