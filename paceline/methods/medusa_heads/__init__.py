"""Heads on the newest hidden state, which Medusa-1 and -2 share."""
