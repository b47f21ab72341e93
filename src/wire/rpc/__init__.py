"""gRPC of the router, the shards and the nodes: tuning, addresses, calls to several ranks."""
