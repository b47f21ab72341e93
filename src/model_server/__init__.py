"""Data plane: one process per device that runs the model behind the `generate.v3` gRPC contract."""
