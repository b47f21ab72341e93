"""The gRPC service of the model server; the only package that knows the messages."""
