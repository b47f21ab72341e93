"""The stages, a module each, and the table of them."""
