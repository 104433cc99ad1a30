"""Cycles of speculation over acceptance, drafting cost, round trip and load, through the real services.

`python -m experiments.pipeline` measures them beside plain decoding and beside the theory. docs/experiments.md says
what is real in it and what is synthetic.
"""
