"""What a link does to the bytes of each direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.contract.errors import InvalidRequestError

MAX_DELAY_MS = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """One direction of a link.

    Attributes:
        delay_ms: time each byte is on the way, milliseconds.
        jitter_ms: mean of what is added to it, exponentially distributed; order is kept, as TCP keeps it.
        mbit_per_s: bandwidth; 0 has no bound.
        stall_every_s: a stall begins every so many seconds after the link's start; 0: never.
        stall_ms: how long nothing comes out then; all of it comes out at once behind.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit_per_s: float = 0.0
    stall_every_s: float = 0.0
    stall_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = 1e6 if field.name == "mbit_per_s" else MAX_DELAY_MS
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise InvalidRequestError(field.name, f"must be a number from 0 to {most:g}, got {value!r}")
        if self.stall_ms and self.stall_ms >= self.stall_every_s * 1e3:
            raise InvalidRequestError(
                "stall_ms", "must be shorter than stall_every_s: nothing would come out"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinkSettings:
        """Settings from plain values; what is left out is 0.

        Raises:
            InvalidRequestError: a name is unknown or a value out of range.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidRequestError(unknown[0], f"no such setting; there are {', '.join(sorted(known))}")
        return cls(**values)

    def as_dict(self) -> dict[str, float]:
        """Plain values, as `from_dict` reads them."""
        return asdict(self)
