"""What is measured: models without files, an engine or a server around them."""
