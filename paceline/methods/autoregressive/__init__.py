"""Drafters that go on from the output of their own layer."""
