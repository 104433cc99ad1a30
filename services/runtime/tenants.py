"""Tenants: whose request it is, for statistics alone.

Responsible for: a bounded number of labels. Deliberately does not know: rights or limits of tenants; there are none.
`paceline.contract.fields` says what may name a tenant. Used by the gateway, the conductor and the scheduler.
"""

from __future__ import annotations

from paceline.contract.limits import MAX_TENANTS

HEADER = "x-tenant"
"""gRPC metadata that names the tenant where the request's own field does not."""
OTHER = "other"
"""Label of all tenants beyond MAX_TENANTS."""


class TenantLabels:
    """Labels for the first 64 tenants; all further tenants get one label."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, tenant: str) -> str:
        """The label of a tenant that is not empty."""
        if tenant not in self._known:
            if len(self._known) >= MAX_TENANTS:
                return OTHER
            self._known.add(tenant)
        return tenant
