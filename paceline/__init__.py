"""Paceline: exact speculative decoding with drafter and target apart."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 2
"""Version of the frames in paceline.v1; peers with different versions refuse each other."""
