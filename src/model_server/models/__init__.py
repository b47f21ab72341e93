"""What a family of models looks like (spec, families) and the one decoder that runs them."""
