"""Words of other servers' command lines, and ours."""
