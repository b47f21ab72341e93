"""What families of models look like, and the decoder that runs them."""
