"""The interface of ways to run a model, and CUDA graphs."""
