"""What two processes must agree on: RPC messages, log lines, options, how grammars compile, the demo model.

Knows none of the three programs (launcher, router, model server); they import it, never the other way round.
"""
