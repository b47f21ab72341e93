"""HTTP beneath the routes: bodies, events, connections."""
