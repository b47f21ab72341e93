"""The interface of every way of running a model, and CUDA graphs of its decode steps."""
