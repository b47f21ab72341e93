"""One file for each engine, with `load(model, dtype)`; each runs in the environment of its engine."""
