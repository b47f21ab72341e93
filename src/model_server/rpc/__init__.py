"""The gRPC door of the model server; the only place that knows the wire format."""
