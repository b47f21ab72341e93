"""The router's gRPC client; the only package of the router that knows the wire format."""
