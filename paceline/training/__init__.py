"""Training of drafters: text that the target writes itself, objectives (one file per method), one trainer.

Knows nothing of services, gRPC, Ray or Redis. Called by the command line and by tests.
"""
