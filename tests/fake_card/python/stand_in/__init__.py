"""The Python side of the stand-in for a GPU: counters, and kernels and operators that compute on the CPU."""
