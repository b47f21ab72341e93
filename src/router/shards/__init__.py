"""The router's gRPC client; alone knows the wire format."""
