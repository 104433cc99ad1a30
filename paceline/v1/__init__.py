"""Generated protobuf and gRPC stubs; made from protos/ by `make protos`."""
