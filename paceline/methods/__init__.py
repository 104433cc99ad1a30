"""Drafting methods: one package per method, and the small packages that several methods share.

`registry.py` lists the methods, `method.py` says what a method declares, `drafter.py` is the protocol of a drafter, and
`loading.py` loads one from its checkpoint. This file and the `__init__.py` of each method import no torch: the
scheduler reads the registry, and it has none.
"""
