"""CPU kernels and what exists for them alone."""

import paceline.target  # noqa: F401 (it imports these modules in an order that works)
