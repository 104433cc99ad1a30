"""Asks a server of this container whether it serves, over grpc.health.v1; exit status 0 says yes.

For container runtimes that have no gRPC probe of their own (compose); Kubernetes asks by itself. Called as
``health.py PORT [SERVICE]``. Deliberately knows nothing of our packages, so that it starts fast.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, service: str = "", timeout_s: float = 2.0) -> bool:
    """Whether the health service at `address` calls `service` SERVING within `timeout_s`."""
    try:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    asked = sys.argv[2] if len(sys.argv) > 2 else ""
    sys.exit(0 if is_serving(f"127.0.0.1:{int(sys.argv[1])}", asked) else 1)
