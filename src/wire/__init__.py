"""What two processes must agree on byte for byte: RPC messages, log lines, how an option is spelled, the demo model.

Knows none of the rooms (launcher, router, model server); they import it, never the other way round.
"""
