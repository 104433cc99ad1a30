"""A decoder model: its architecture, its weights, and its blocks."""
