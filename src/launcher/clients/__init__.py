"""`launcher launch`: settings of programs that use a running server."""
