"""Placement experiments and benchmarks."""
