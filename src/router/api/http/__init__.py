"""HTTP beneath the routes: bodies, events, connections, clients that disconnect."""
