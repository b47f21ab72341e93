"""The HTTP routes, a folder for each family of them."""
