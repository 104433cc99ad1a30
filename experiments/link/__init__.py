"""A network in a process: a TCP proxy on loopback with delay, jitter, a bandwidth and stalls, for experiments.

It needs no rights and no kernel module. :class:`experiments.link.process.LinkProcess` is what experiments use.
"""
