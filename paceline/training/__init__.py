"""Training of drafters: text that the target writes, the loop, and what the objectives of all methods share.

Knows no method, and nothing of services, gRPC, Ray or Redis. Called by the methods' recipes and by the command line.
"""
