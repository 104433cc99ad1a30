"""What was generated for each tenant: a part of services.scheduler.measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from paceline.contract.limits import MAX_TENANT_CHARACTERS, MAX_TENANTS
from services.runtime.tenants import OTHER
from services.scheduler.layout import integer, text

_MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class Use:
    """Sums over the requests that ended.

    Attributes:
        decode_us: from first to last token, microseconds.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    decode_us: int = 0

    def plus(self, other: Use) -> Use:
        """Both together."""
        return Use(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Use)))

    @property
    def acceptance(self) -> float:
        """Accepted over verified draft tokens; 0 without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of one request, from its first token to its last; 0 where no request had two tokens."""
        return max(self.num_tokens - self.num_requests, 0) / self.decode_us * 1e6 if self.decode_us else 0.0


@dataclass(frozen=True, slots=True)
class TenantsPart:
    """Use by tenant; requests without a tenant are not included."""

    name: ClassVar[str] = "tenants"
    tenants: Mapping[str, Use] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Requests ever."""
        return sum(use.num_requests for use in self.tenants.values())

    def merged(self, newer: Self) -> Self:
        """This part with newer requests added; tenants beyond MAX_TENANTS are counted as one."""
        tenants = dict(self.tenants)
        for name, use in newer.tenants.items():
            key = name if name in tenants or len(tenants) < MAX_TENANTS else OTHER
            tenants[key] = tenants.get(key, Use()).plus(use)
        return type(self)(tenants)

    def to_dict(self) -> dict[str, Any]:
        """JSON layout; acceptance and speed in it are for people."""
        return {
            "count": self.count,
            "tenants": [
                {
                    "tenant": name,
                    **{f.name: getattr(use, f.name) for f in fields(Use)},
                    "acceptance": use.acceptance,
                    "tokens_per_s": use.tokens_per_s,
                }
                for name, use in sorted(self.tenants.items())
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read the layout back, checking every number."""
        return cls(
            {
                text(use["tenant"], MAX_TENANT_CHARACTERS): Use(
                    *(integer(use[f.name], 0, _MAX_COUNT) for f in fields(Use))
                )
                for use in value["tenants"][: MAX_TENANTS + 1]
            }
        )

    def estimator(self) -> Mapping[str, Use]:
        """Use by tenant."""
        return self.tenants
