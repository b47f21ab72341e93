"""The gRPC door of the router; the only place that knows the wire format."""
