"""What two processes must agree on: RPC messages, log lines, options, grammars. Imports none of the three programs."""
