"""What all processes agree on: errors, status codes, limits, checks of fields and the policy.

Only the generated protos are below this package. It imports neither torch nor gRPC.
"""
