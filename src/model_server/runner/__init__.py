"""The interface behind which every way of running a model stands, and CUDA graphs of its decode steps."""
