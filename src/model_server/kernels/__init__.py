"""Triton kernels: one file per family, each tested against plain torch in Triton's interpreter.

Only code that `availability.usable` has let through may import the files with kernels: without a GPU there need be no
Triton, and on a CPU nothing here is ever loaded. `variant` says what a kernel is compiled for ahead of time.
"""
