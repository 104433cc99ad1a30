"""Noise, processors and verification: pure functions on tensors, with no model and no I/O.

`params` alone imports no torch, so that the gateway can check a request's parameters without it.
"""
