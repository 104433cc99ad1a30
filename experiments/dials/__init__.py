"""Parts of a deployment whose speed and luck are set by dials, for experiments alone.

A drafter that knows the target's text and is right as often as it is told to be, a policy that is read from a file, and
a tiny target. All else in such a deployment (services, streams, tries, verification, commits) is the real thing.
"""
