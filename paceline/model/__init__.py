"""A decoder model: its architecture, its weights, and its blocks."""

import paceline.target  # noqa: F401 (it imports these modules in an order that works)
