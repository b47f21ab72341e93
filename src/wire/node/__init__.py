"""Messages between the launchers of a group of nodes."""
