"""The HTTP server: start-up, sockets, the application, a stop that loses nothing."""
