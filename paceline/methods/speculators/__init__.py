"""The layout of the package speculators, which several methods have."""
