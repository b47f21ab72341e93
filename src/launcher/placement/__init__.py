"""Where the launchers of a group of nodes are started by something else than its user."""
