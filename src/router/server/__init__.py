"""The HTTP server: start, sockets, application, lossless stop."""
