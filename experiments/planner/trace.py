"""Step traces: what a target, a drafter and the way between them were like over time, to replay policies on.

Responsible for: the values, their JSON-lines form, and checking it when it is read. The first line describes the
trace; each further one is a round:

    [t_ms, right, siblings, step_scale, draft_scale, rtt_us]

`right` and `siblings` have one digit for each running sequence: how many drafted tokens the target would accept
from here on (15 for 15 and more, in hexadecimal), and which of the drafter's further choices is the target's token
where one is not accepted (1 for the second choice; 9 for none of them).

Deliberately does not know: policies (`replay`), how a trace came about (`generate`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.atomic_write import write_text

MAX_RIGHT = 15
NO_SIBLING = 9
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Round:
    """What holds from `t_s` on.

    Attributes:
        t_s: seconds from the start.
        right: per sequence, drafted tokens that would be accepted.
        siblings: per sequence, the choice that would have been right after them.
        step_scale: this round's step time over the curve's.
        draft_scale: this round's draft time over the usual.
        rtt_s: this round's round trip.
    """

    t_s: float
    right: tuple[int, ...]
    siblings: tuple[int, ...]
    step_scale: float
    draft_scale: float
    rtt_s: float

    @property
    def num_sequences(self) -> int:
        """Running sequences."""
        return len(self.right)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What stays the same over a trace.

    Attributes:
        name: of the trace.
        origin: how it came about, for people.
        placement: "separate" or "colocated".
        step_us: (rows, microseconds) of a step, linear in between and beyond.
        draft_base_us: of a draft of any length.
        draft_token_us: per token of a draft.
        draft_path_us: per token of each further path in the same batch.
    """

    name: str
    origin: str
    placement: str
    step_us: tuple[tuple[int, float], ...]
    draft_base_us: float
    draft_token_us: float
    draft_path_us: float


class Trace:
    """Rounds in the order of time.

    Raises:
        ValueError: no rounds, times that do not rise, or a curve of fewer than two points.
    """

    def __init__(self, info: TraceInfo, rounds: Sequence[Round]) -> None:
        self.info = info
        self.rounds = tuple(rounds)
        self._times = [round_.t_s for round_ in self.rounds]
        if not self._times or any(a >= b for a, b in zip(self._times, self._times[1:], strict=False)):
            raise ValueError("a trace needs rounds, and their times must rise")
        if len(info.step_us) < 2 or info.placement not in ("separate", "colocated"):
            raise ValueError("a trace needs two points of its curve, and a placement")
        if any(len(r.right) != len(r.siblings) or not r.right for r in self.rounds):
            raise ValueError("every round needs a digit of both kinds for each sequence, and a sequence")

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self._times[-1]

    def at(self, now_s: float) -> Round:
        """The round in force at a time."""
        return self.rounds[max(0, bisect_right(self._times, now_s) - 1)]

    def step_s(self, rows: int) -> float:
        """Seconds of a usual step."""
        points = self.info.step_us
        right = next((i for i, (knot, _) in enumerate(points) if knot >= rows), len(points) - 1)
        (x0, y0), (x1, y1) = points[max(right, 1) - 1], points[max(right, 1)]
        return (y0 + (y1 - y0) * (rows - x0) / (x1 - x0)) * 1e-6

    def draft_s(self, num_tokens: int, num_paths: int) -> float:
        """Seconds to draft so many tokens on each of some paths together."""
        if not num_tokens or not num_paths:
            return 0.0
        info = self.info
        per_token_us = info.draft_token_us + info.draft_path_us * (num_paths - 1)
        return (info.draft_base_us + num_tokens * per_token_us) * 1e-6

    def write(self, path: Path) -> None:
        """Write it as JSON lines."""
        lines = [json.dumps({"version": _VERSION, **asdict(self.info)})]
        for r in self.rounds:
            digits = ("".join(f"{n:x}" for n in r.right), "".join(f"{n:x}" for n in r.siblings))
            scales = (round(r.step_scale, 3), round(r.draft_scale, 3), round(r.rtt_s * 1e6))
            lines.append(json.dumps([round(r.t_s * 1e3, 1), *digits, *scales], separators=(",", ":")))
        write_text(path, "\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read it back.

        Raises:
            ValueError: another version, or a line that is no round.
        """
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        described: dict[str, Any] = json.loads(head)
        if described.pop("version", None) != _VERSION:
            raise ValueError(f"{path.name} is not a trace of version {_VERSION}")
        described["step_us"] = tuple((int(rows), float(us)) for rows, us in described["step_us"])
        return cls(TraceInfo(**described), [_round(json.loads(line)) for line in lines])


def _round(values: list[Any]) -> Round:
    t_ms, right, siblings, step_scale, draft_scale, rtt_us = values
    if not (t_ms >= 0 and step_scale > 0 and draft_scale > 0 and rtt_us >= 0):
        raise ValueError(f"not a round: {values}")
    digits = tuple(int(digit, 16) for digit in right), tuple(int(digit, 16) for digit in siblings)
    return Round(t_ms * 1e-3, *digits, step_scale, draft_scale, rtt_us * 1e-6)
