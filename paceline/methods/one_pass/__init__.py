"""Drafters that propose all tokens of a draft in one pass."""
