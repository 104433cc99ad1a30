"""Decoding in one process: target and drafter on the verifier's own parts, without services around them."""
