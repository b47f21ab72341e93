"""`launcher estimate`: what a model takes and what fits, before any weights are downloaded."""
