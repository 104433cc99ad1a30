"""Drafters that continue from the output of their own layer."""
