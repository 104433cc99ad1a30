"""Tenants: whose request it is, for statistics alone.

Responsible for: what may name one, and keeping the number of labels bounded. Deliberately does not know: rights or
limits of tenants; there are none here. Used by the gateway, the conductor and the scheduler.
"""

from __future__ import annotations

import re

from paceline.contract.errors import InvalidRequestError

HEADER = "x-tenant"
"""gRPC metadata that names the tenant where the request's own field does not."""
MAX_TENANTS = 64
OTHER = "other"
"""Stands for the tenants beyond MAX_TENANTS."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{0,64}")


def check_tenant(field: str, tenant: str) -> str:
    """The tenant, which may be empty.

    Raises:
        InvalidRequestError: naming the field.
    """
    if _NAME.fullmatch(tenant) is None:
        raise InvalidRequestError(field, "at most 64 letters, digits, underscores, dots and hyphens")
    return tenant


class TenantLabels:
    """The first 64 tenants by name, all further ones as one."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, tenant: str) -> str:
        """The label of a tenant that is not empty."""
        if tenant not in self._known:
            if len(self._known) >= MAX_TENANTS:
                return OTHER
            self._known.add(tenant)
        return tenant
